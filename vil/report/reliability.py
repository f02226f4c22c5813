"""Write the table of docs/reliability.md from the results of tests/faults.

VIL_FAULTS_JSON=benchmarks/results/faults.json ./scripts/test.sh tests/faults -m faults
python -m vil.report.reliability benchmarks/results/faults.json docs/reliability.md
"""

import json
import sys
from pathlib import Path

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
FAULTS = {  # what is done to a run
    "F1": "SIGKILL in the middle of saving, 100 times",
    "F2": "one process stopped by SIGTERM three times, and started again",
    "F3": "one of two ranks killed three times, and both started again by the launcher",
    "F4": "SIGKILL at three steps in the middle of an epoch, and started again",
    "F5": "SIGTERM at random moments of training, evaluation and waiting for data",
    "F6": "SIGTERM to the whole process group, loader workers too",
    "F7": "SIGKILL to one of two ranks, `--max-restarts 1`",
    "F8": "one of two ranks stands still",
    "F9": "one bit flipped, or a file cut, in the newest checkpoint",
    "F10": "a full disk",
    "F11": "a loss that is no number on one of two ranks",
    "F12": "infinite gradients in float16 and bfloat16",
    "F13": "one picture in twenty is broken: cut, empty, text, too large to unpack",
    "F14": "a loader worker leaves, or is killed as when memory runs out",
    "F15": "evaluation on 1, 2 and 3 ranks: sets that do not divide, and smaller than the ranks",
    "F16": "files of strangers that run code, lead elsewhere or never end",
    "F17": "a typing error in a key, on the command line or in a file",
    "F18": "a value of the wrong type, range or choice, for every key",
    "F19": "every shipped config written, read and written again",
    "F20": "weights of another architecture, head or image size",
    "F24": "further runs into the folder of a run",
    "F25": "a clock that jumps; folders, data, devices and launchers that will not do",
    "F26": "loader workers by fork, spawn and forkserver, every format of data",
    "F27": "the log ends in the middle of a line",
    "F28": "boxes without area, outside the picture, of a pixel, no numbers; crowds, pictures "
    "without boxes, wrong sizes",
    "F29": "an edited config at `--resume`",
    "F30": "a signal to one of two ranks only",
    "F31": "a disk that fails once, for a while, or is slow",
    "F32": "`python -O`, `-W error`, hash seeds, the C locale, another time zone",
}


def table(results: dict[str, dict]) -> str:
    """Return a row per measurement. KeyError for a fault that is not in FAULTS."""
    lines = ["| what happens | figure | found | wanted |", "|---|---|---|---|"]
    for fault in sorted(results, key=lambda name: int(name[1:])):
        for number, (what, row) in enumerate(results[fault].items()):
            first = FAULTS[fault] if number == 0 else ""
            lines.append(f"| {first} | {what} | {shown(row['found'])} | {shown(row['wanted'])} |")
    return "\n".join(lines)


def shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def write(results: dict[str, dict], page: Path) -> None:
    """Replace the table in the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
