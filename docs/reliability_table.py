"""Write the tables of docs/reference/faults_*.md from the results of the tests in tests/faults.

VIL_FAULTS_JSON=benchmarks/results/faults.json ./scripts/test.sh tests/faults -m faults
python docs/reliability_table.py benchmarks/results/faults.json docs/reference/faults_*.md
"""

import json
import re
import sys
from pathlib import Path

TABLE = re.compile(r"(<!-- table ([F\d ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
FAULTS = {  # the fault that a test causes in a run
    "F1": "SIGKILL during a save, 100 times",
    "F2": "SIGTERM to one process at three steps, restarted each time",
    "F3": "one of two ranks killed three times; the launcher restarts both each time",
    "F4": "SIGKILL at three steps in the middle of an epoch, restarted each time",
    "F5": "SIGTERM at random times during training, evaluation and data loading",
    "F6": "SIGTERM to the whole process group, including loader workers",
    "F7": "SIGKILL to one of two ranks, with `--max-restarts 1`",
    "F8": "one of two ranks hangs",
    "F9": "one bit flipped, or a file truncated, in the newest checkpoint",
    "F10": "a full disk",
    "F11": "a non-finite loss on one of two ranks",
    "F12": "infinite gradients in float16 and bfloat16",
    "F13": "one image in twenty is broken: truncated, empty, text, too large to decode",
    "F14": "a loader worker exits, or is killed as if out of memory",
    "F15": "evaluation on 1, 2 and 3 ranks: data sets that do not divide evenly, or have fewer "
    "images than ranks",
    "F16": "malicious files: code, links to other files, too large or nested too deep",
    "F17": "a typo in a config key, on the command line or in a file",
    "F18": "a value of the wrong type or range, for every key",
    "F19": "every shipped config written, read and written again",
    "F20": "weights of a different architecture, head or image size",
    "F24": "a second run in the folder of a run",
    "F25": "the system clock jumps; unusable folders, data, devices and launchers",
    "F26": "loader workers started by fork, spawn and forkserver, with every data format",
    "F27": "the log ends in the middle of a line",
    "F28": "boxes without area, outside the image, of one pixel, or with NaN or Inf; crowds; "
    "images without boxes; wrong image sizes",
    "F29": "a config edited before `--resume`",
    "F30": "a signal to one of two ranks only",
    "F31": "a disk that fails once or for a while, or is slow",
    "F32": "`python -O`, `-W error`, hash seeds, the C locale, a different time zone",
}


def table(found: dict[str, dict]) -> str:
    """Return a Markdown table with a row per check. Raises KeyError for a fault not in FAULTS."""
    lines = ["| fault | check | result | expected |", "|---|---|---|---|"]
    for fault in sorted(found, key=lambda name: int(name[1:])):
        for number, (check, row) in enumerate(found[fault].items()):
            first = FAULTS[fault] if number == 0 else ""
            lines.append(f"| {first} | {check} | {shown(row['found'])} | {shown(row['wanted'])} |")
    return "\n".join(lines)


def shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def write(found: dict[str, dict], page: Path) -> None:
    """Replace the tables in a page. The comment above each table lists its faults."""

    def rows(marker: re.Match[str]) -> str:
        faults = {name: found[name] for name in marker[2].split()}
        return f"{marker[1]}\n{table(faults)}\n\n{marker[3]}"

    page.write_text(TABLE.sub(rows, page.read_text()))


if __name__ == "__main__":
    for path in sys.argv[2:]:
        write(json.loads(Path(sys.argv[1]).read_text()), Path(path))
