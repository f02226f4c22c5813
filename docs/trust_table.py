"""Write the table of docs/reference/trust.md from the numbers of cases that the tests counted.

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
    "1": "An output never overwrites an input, a file of a run or a folder.",
    "2": "A run is never silently restarted, or silently resumed with other data or another model.",
    "3": "Classes are matched by name.",
    "4": "Pixel values are converted by a documented rule, and images are upright.",
    "5": "Non-finite weights are refused, and JSON output is valid.",
    "6": "Dataset descriptions and run folders never lead to a path outside their root.",
    "7": "No command hangs or exhausts the machine's resources.",
    "8": "Standard output and standard error may be full or closed.",
    "9": "Every failure prints one line and has a documented exit code.",
    "10": "Attention is correct under every transform, and on grids smaller than the window.",
    "11": "All of the above hold for randomly changed files and command lines (a fuzzer).",
    "12": "Files of the 2021 code give the results of that code.",
}


def table(found: dict[str, dict[str, dict[str, int]]]) -> str:
    """Return a Markdown table with a row per class. Raises KeyError for a class not in CLASSES."""
    lines = ["| class | guarantee | cases | tests |", "|---|---|---|---|"]
    for number in sorted(found, key=int):
        count = sum(sum(runs.values()) for runs in found[number].values())
        files = ", ".join(f"`{file}`" for file in sorted(found[number]))
        lines.append(f"| {number} | {CLASSES[number]} | {count} | {files} |")
    return "\n".join(lines)


def write(found: dict, page: Path) -> None:
    """Replace the table in a page."""
    text = page.read_text()
    page.write_text(TABLE.sub(lambda match: f"{match[1]}{table(found)}\n{match[2]}", text))


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
