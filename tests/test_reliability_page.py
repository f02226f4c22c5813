"""docs/reliability.md tells what the faults' tests found, and nothing that was missed."""

import json
import re
from pathlib import Path

from vil.report.reliability import BEGIN, END, FAULTS, table, write

ROOT = Path(__file__).parents[1]
FOUND = json.loads((ROOT / "benchmarks/results/faults.json").read_text())


def test_the_page_is_written_from_the_result(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nof yesterday\n{END}\nafter\n")
    write(FOUND, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "of yesterday" not in text
    assert table(FOUND) in (ROOT / "docs/reliability.md").read_text()


def test_every_figure_is_what_was_wanted():
    assert all(row["kept"] for rows in FOUND.values() for row in rows.values())


def test_every_fault_has_words_and_a_test():
    recorded = set()
    for file in (ROOT / "tests/faults").glob("test_*.py"):
        recorded |= set(re.findall(r'record\("(F\d+)"', file.read_text()))
    assert recorded == FAULTS.keys() == FOUND.keys()
