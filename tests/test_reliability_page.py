"""docs/reference/faults_*.md have every result of the faults' tests, and no failure."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from reliability_table import FAULTS, TABLE, write  # noqa: E402

FOUND = json.loads((ROOT / "benchmarks/results/faults.json").read_text())
PAGES = sorted((ROOT / "docs/reference").glob("faults_*.md"))


def test_the_pages_are_written_from_the_result(tmp_path):
    """Rows that were changed by hand are replaced, and the text around the tables stays."""
    for page in PAGES:
        text = page.read_text()
        copy = tmp_path / page.name
        copy.write_text(TABLE.sub(r"\1old rows\n\3", text))
        write(FOUND, copy)
        assert copy.read_text() == text


def test_every_fault_is_on_one_page():
    named = [name for page in PAGES for _, faults, _ in TABLE.findall(page.read_text())
             for name in faults.split()]  # fmt: skip
    assert sorted(named) == sorted(FOUND)


def test_every_result_is_what_was_wanted():
    assert all(row["kept"] for rows in FOUND.values() for row in rows.values())


def test_every_fault_has_words_and_a_test():
    recorded = set()
    for file in (ROOT / "tests/faults").glob("test_*.py"):
        recorded |= set(re.findall(r'record\("(F\d+)"', file.read_text()))
    assert recorded == FAULTS.keys() == FOUND.keys()
