"""The table of docs/reference/trust.md, from the cases that the tests counted.

VIL_TRUST_JSON=benchmarks/results/trust.json ./scripts/test.sh
VIL_TRUST_JSON=benchmarks/results/trust.json ./scripts/test.sh -m long
python docs/trust_table.py benchmarks/results/trust.json docs/reference/trust.md
"""

import json
import re
import sys
from pathlib import Path

TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end of table -->)", re.DOTALL)
CLASSES = {
    "1": "An output never replaces an input, a file of a run or a folder.",
    "2": "A run is never restarted, or continued on something else, without a word.",
    "3": "Classes are matched by name.",
    "4": "Numbers of images are converted by a stated rule, and images are upright.",
    "5": "Weights that are not finite are refused; JSON output is valid.",
    "6": "Descriptions of data and folders of runs stay below their root.",
    "7": "Nothing hangs or takes all of the machine.",
    "8": "Standard output and stderr may be full, closed or gone.",
    "9": "Every failure is one line and a known exit code.",
    "10": "The operation is right under every transform, and on grids smaller than the window.",
    "11": "Changed files and command lines (a fuzzer) keep all of the above.",
    "12": "A file of the 2021 code computes what that code computed.",
}


def table(found: dict[str, dict[str, dict[str, int]]]) -> str:
    """A row per class. KeyError for a class that is not in CLASSES."""
    lines = ["| class | what holds | cases | tests |", "|---|---|---|---|"]
    for number in sorted(found, key=int):
        count = sum(sum(runs.values()) for runs in found[number].values())
        files = ", ".join(f"`{file}`" for file in sorted(found[number]))
        lines.append(f"| {number} | {CLASSES[number]} | {count} | {files} |")
    return "\n".join(lines)


def write(found: dict, page: Path) -> None:
    """Replace the table of a page."""
    text = page.read_text()
    page.write_text(TABLE.sub(lambda match: f"{match[1]}{table(found)}\n{match[2]}", text))


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
