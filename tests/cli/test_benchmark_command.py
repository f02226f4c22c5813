"""`vil benchmark attention`: what it prints and writes, and how it refuses."""

import csv
import json
import re

import pytest

from tests.common.backends import restored_backends
from tests.common.small_runs import vil
from vil.ops import BACKENDS

SMALL = ("--head-dim", "4", "--batch", "1", "--rounds", "1", "--device", "cpu")
NAMES = [*BACKENDS, "sdpa", "sdpa_masked", "natten", "floor"]
COLUMNS = (
    "backend grid window mask mode batch heads head_dim num_global dtype bias device pairs auto "
    "rounds forward_ms backward_ms peak_mib extra_mib over_chunk_handgrad over_sdpa over_floor "
    "note reason"
)
MINE = """
from vil.ops import BACKENDS, register_backend
register_backend("mine", BACKENDS["gathered"].attend)
"""


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
    _, out = result
    heads = re.findall(r"^(\d+ x \d+) tokens, w 2, (\w+), .*; auto: (\w+)$", out, re.MULTILINE)
    places = [(grid, mask) for mask in ("chunks", "cyclic") for grid in ("3 x 3", "5 x 4")]
    assert [(grid, mask) for grid, mask, _ in heads] == places
    for name in NAMES:
        assert len(re.findall(rf"^  {re.escape(name)}( \*)? +\S", out, re.MULTILINE)) == 4, name
    stars = re.findall(r"^  (\w+) \*", out, re.MULTILINE)
    assert stars == [taken for _, _, taken in heads], "the star marks what auto takes"
    assert out.count("it computes only the exact window (SW_EXACT 1)") == 8


@pytest.mark.long
def test_json_and_csv_hold_the_same_rows_and_json_the_machine(result):
    folder, _ = result
    found = json.loads((folder / "attention.json").read_text())
    about, rows = found["machine"], found["rows"]
    assert about.keys() >= {"name", "processor", "threads", "torch", "date", "command"}
    assert [row["backend"] for row in rows] == NAMES * 4
    for row in rows:
        assert " ".join(row) == COLUMNS
        assert bool(row["reason"]) == (row["forward_ms"] is None)
    with (folder / "attention.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["backend"] for line in lines] == NAMES * 4
    assert lines[0].keys() == rows[0].keys()
    assert {line["grid"] for line in lines} == {"3x3", "5x4"}
    timed = [(row, line) for row, line in zip(rows, lines) if not row["reason"]]
    assert all(float(line["forward_ms"]) == row["forward_ms"] for row, line in timed)


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


def test_a_backend_of_ones_own_takes_part(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    words = ("--grids", "4", "--window", "2", "--import", "mine.py", "--backends", "mine")
    ended = vil("benchmark", "attention", *SMALL, *words, "--modes", "0,3,-1")
    assert ended.code == 0, ended.err
    assert len(re.findall(r"^  mine +\d", ended.out, re.MULTILINE)) == 3
    assert ", mode -1," in ended.out
    assert ", mode 3," in ended.out


REFUSED = {
    "backend": ("--backends bloked", r"unknown backend 'bloked'; did you mean 'blocked'\?.*sdpa"),
    "no backend": ("--backends ,", r"--backends: expected names"),
    "dtype": ("--dtype float33", r"unknown dtype 'float33'; did you mean 'float32'\?"),
    "mask": ("--masks exakt", r"unknown mask 'exakt'; did you mean 'exact'\?"),
    "mode": ("--modes 9", r"mode must be -1 .* or 1\.\.8 .*, got 9"),
    "negative mode": ("--modes=-2", r"--modes: .* of at least -1, got '-2'"),
    "exact with a mode": ("--masks exact --modes 1", r"the exact window .* needs all nine"),
    "window": ("--window 0", r"--window: .* of at least 1, got '0'"),
    "grid": ("--grids 0", r"--grids: .* at least 1, got '0'"),
    "grid of three": ("--grids 2x3x4", r"--grids: .*'2x3x4'"),
    "a word": ("--grids small", r"--grids: .*'small'"),
    "heads": ("--heads 0", r"--heads: "),
    "rounds": ("--rounds 0", r"--rounds: "),
    "global tokens": ("--num-global=-1", r"--num-global: .* of at least 0"),
    "device": ("--device tpu", r"--device: expected auto, cpu or cuda, got 'tpu'"),
    "folder": ("--out file/below", r"--out file/below: "),
    "import": ("--import none.py", r"--import none\.py: no such Python file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_before_anything_is_measured(name, tmp_path):
    words, pattern = REFUSED[name]
    (tmp_path / "file").touch()
    ended = vil("benchmark", "attention", *words.split())
    assert ended.code == 2, ended
    assert re.search(pattern, ended.err), ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_without_a_cuda_device_there_is_no_figure_for_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ended = vil("benchmark", "attention", "--device", "cuda")
    assert (ended.code, ended.out) == (2, "")
    assert (
        ended.err
        == "vil benchmark attention: --device cuda: there is no CUDA device (choices: auto, cpu)\n"
    )
