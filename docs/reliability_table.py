"""The tables of docs/reference/faults_*.md, from what the tests in tests/faults found.

VIL_FAULTS_JSON=benchmarks/results/faults.json ./scripts/test.sh tests/faults -m faults
python docs/reliability_table.py benchmarks/results/faults.json docs/reference/faults_*.md
"""

import json
import re
import sys
from pathlib import Path

TABLE = re.compile(r"(<!-- table ([F\d ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
FAULTS = {  # what is done to a run
    "F1": "SIGKILL in the middle of saving, 100 times",
    "F2": "one process stopped by SIGTERM three times, and started again",
    "F3": "one of two ranks killed three times, and both started again by the launcher",
    "F4": "SIGKILL at three steps in the middle of an epoch, and started again",
    "F5": "SIGTERM at random moments of training, evaluation and waiting for data",
    "F6": "SIGTERM to the whole process group, loader workers too",
    "F7": "SIGKILL to one of two ranks, `--max-restarts 1`",
    "F8": "one of two ranks hangs",
    "F9": "one bit flipped, or a file truncated, in the newest checkpoint",
    "F10": "a full disk",
    "F11": "a loss that is not finite on one of two ranks",
    "F12": "infinite gradients in float16 and bfloat16",
    "F13": "one image in twenty is broken: truncated, empty, text, too large to unpack",
    "F14": "a loader worker exits, or is killed as when memory runs out",
    "F15": "evaluation on 1, 2 and 3 ranks: sets that do not divide, or are smaller than the ranks",
    "F16": "malicious files that run code, link elsewhere or never end",
    "F17": "a typing error in a key, on the command line or in a file",
    "F18": "a value of the wrong type, range or choice, for every key",
    "F19": "every shipped config written, read and written again",
    "F20": "weights of another architecture, head or image size",
    "F24": "more runs in the folder of a run",
    "F25": "a clock that jumps; unusable folders, data, devices and launchers",
    "F26": "loader workers by fork, spawn and forkserver, every format of data",
    "F27": "the log ends in the middle of a line",
    "F28": "boxes without area, outside the image, of a pixel, not numbers; crowds, images "
    "without boxes, wrong sizes",
    "F29": "an edited config at `--resume`",
    "F30": "a signal to one of two ranks only",
    "F31": "a disk that fails once, for a while, or is slow",
    "F32": "`python -O`, `-W error`, hash seeds, the C locale, another time zone",
}


def table(found: dict[str, dict]) -> str:
    """A row per check. KeyError for a fault that is not in FAULTS."""
    lines = ["| fault | check | result | wanted |", "|---|---|---|---|"]
    for fault in sorted(found, key=lambda name: int(name[1:])):
        for number, (what, row) in enumerate(found[fault].items()):
            first = FAULTS[fault] if number == 0 else ""
            lines.append(f"| {first} | {what} | {shown(row['found'])} | {shown(row['wanted'])} |")
    return "\n".join(lines)


def shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def write(found: dict[str, dict], page: Path) -> None:
    """Replace the table in a page. The comment above it names its faults."""

    def rows(marker: re.Match[str]) -> str:
        faults = {name: found[name] for name in marker[2].split()}
        return f"{marker[1]}\n{table(faults)}\n\n{marker[3]}"

    page.write_text(TABLE.sub(rows, page.read_text()))


if __name__ == "__main__":
    for path in sys.argv[2:]:
        write(json.loads(Path(sys.argv[1]).read_text()), Path(path))
