"""docs/reference/trust.md is written from the counts of a run of the tests."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from trust_table import CLASSES, TABLE, write  # noqa: E402

FOUND = json.loads((ROOT / "benchmarks/results/trust.json").read_text())
PAGE = ROOT / "docs/reference/trust.md"


def test_the_page_is_written_from_the_counts(tmp_path):
    copy = tmp_path / PAGE.name
    copy.write_text(TABLE.sub(r"\1old rows\n\2", PAGE.read_text()))
    write(FOUND, copy)
    assert copy.read_text() == PAGE.read_text()


def test_every_class_has_cases_and_every_file_is_counted():
    assert FOUND.keys() == CLASSES.keys()
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.trust\(\d", file.read_text())
    }
    counted = {file for files in FOUND.values() for file in files}
    assert marked - counted <= {"tests/trust/test_endurance.py"}  # slow
    assert counted <= marked
