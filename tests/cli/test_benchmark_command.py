"""`vil benchmark attention`: what it prints and writes."""

import csv
import json
import re

import pytest

from tests.common.backends import restored_backends
from tests.common.small_runs import vil
from vil.ops import BACKENDS

SMALL = ("--head-dim", "4", "--batch", "1", "--rounds", "1", "--device", "cpu")
NAMES = [*BACKENDS, "sdpa", "sdpa_masked", "natten", "floor"]


@pytest.fixture(autouse=True)
def own_table():
    with restored_backends():
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """All backends on four cases: two grids, two masks."""
    folder = tmp_path_factory.mktemp("benchmark") / "of" / "attention"
    grids = ("--grids", "3,5x4", "--window", "2", "--masks", "chunks,cyclic")
    ended = vil("benchmark", "attention", *SMALL, *grids, "--out", folder)
    assert ended.code == 0, ended.err
    return folder, ended.out


@pytest.mark.long
def test_each_case_is_a_table_of_every_candidate(result):
    folder, out = result
    heads = re.findall(r"^(\d+ x \d+) tokens, w 2, (\w+), .*; auto: (\w+)$", out, re.MULTILINE)
    places = [(grid, mask) for mask in ("chunks", "cyclic") for grid in ("3 x 3", "5 x 4")]
    assert [(grid, mask) for grid, mask, _ in heads] == places
    for name in NAMES:
        assert len(re.findall(rf"^  {re.escape(name)}( \*)? +\S", out, re.MULTILINE)) == 4, name
    rows = json.loads((folder / "attention.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == NAMES * 4
    with (folder / "attention.csv").open() as file:
        timed = [(row, line) for row, line in zip(rows, csv.DictReader(file)) if not row["reason"]]
    assert all(float(line["forward_ms"]) == row["forward_ms"] for row, line in timed)
    stars = re.findall(r"^  (\w+) \*", out, re.MULTILINE)
    assert stars == [taken for _, _, taken in heads], "the star marks what auto takes"
    assert out.count("it computes only the exact window (SW_EXACT 1)") == 8


def test_only_named_backends_run_and_each_reason_is_logged(tmp_path):
    words = ("--grids", "6", "--window", "2", "--masks", "exact", "--no-bias", "--num-global", "0")
    names = ("--backends", "natten,chunk_handgrad,blocked")
    ended = vil("benchmark", "attention", *SMALL, *words, *names)
    assert ended.code == 0, ended.err
    assert "G 0, float32, no bias; auto: " in ended.out
    (folder,) = (tmp_path / "benchmarks" / "results").iterdir()
    rows = json.loads((folder / "attention.json").read_text())["rows"]
    reasons = {row["backend"]: row["reason"] for row in rows}
    assert list(reasons) == ["natten", "chunk_handgrad", "blocked", "floor"]
    assert "CUDA" in reasons["natten"]
    assert not reasons["blocked"]
