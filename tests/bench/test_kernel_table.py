"""The committed table of compiled GPU kernels holds what is promised, and still holds today."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.common.marks import cases
from vil.bench.kernel_roofline import predict_rows
from vil.bench.kernel_table import (
    HEAD_DIMS,
    TARGETS,
    compile_rows,
    find_regressions,
    format_rows,
    list_jobs,
    read_table,
    write_table,
)

ROOT = Path(__file__).parent.parent.parent
ROWS, ABOUT = read_table(ROOT / "benchmarks/results/kernels.json")
JOBS = list_jobs(TARGETS)
# each head dim, with a window or layout that differs from one to the next
SAMPLE = [job for at, job in enumerate(JOBS) if job[0] == "sm_90" and at % 6 == 1]
SAMPLE += [job for job in JOBS if job[0] in ("sm_100", "gfx942") and job[1:] == JOBS[2][1:]]
needs_same_compiler = pytest.mark.skipif(
    find_spec("triton") is None or version("triton") != ABOUT["triton"],
    reason="another version of triton compiles other kernels",
)


def test_the_table_is_complete():
    assert {job[3] for job in SAMPLE} == set(HEAD_DIMS)
    assert list(dict.fromkeys(row.key[:4] for row in ROWS)) == JOBS
    for job in JOBS:
        kernels = [row.kernel for row in ROWS if row.key[:4] == job]
        last = "step" if "axial" in job[1] else "tile"
        assert kernels == ["forward", "query", "key", "global", last]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_nothing_spills(target):
    rows = [row for row in ROWS if row.target == target]
    assert {row.head_dim for row in rows} == set(HEAD_DIMS)
    for row in rows:
        assert row.resources.spilled <= (0 if row.head_dim <= 64 else 32), row
        assert row.resources.loop_local == 0, row
        assert row.blocks >= 2, row
        if row.kernel == "forward" and row.head_dim == 64:
            assert row.resources.shared <= 82 * 1000, row


@pytest.mark.parametrize("target", TARGETS)
def test_matmuls_run_on_tensor_cores(target):
    for row in ROWS:
        if row.target == target:
            assert row.resources.scalar_matmuls == 0, row
            assert row.resources.matmuls > 0, row
            assert row.resources.tensor > 0, row


def test_the_page_has_the_numbers_of_the_table():
    page = (ROOT / "docs/internals/gpu_kernels.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line[:1] == "|"]
    first = [row for row in ROWS if row.key[1:4] == JOBS[2][1:]]
    assert JOBS[2][1:] == ("chunks, w 8", "bfloat16", 64)
    for name in ("forward", "query", "key", "global", "tile"):
        found = [f"{r.resources.registers} / {r.blocks}" for r in first if r.kernel == name]
        assert [line[2:] for line in lines if line[0] == name] == [found]
    rows = [row for row in ROWS if row.key[2:4] == ("bfloat16", 64) and row.target[:4] != "gfx9"]
    for (target, window, *_), x in predict_rows(rows).items():
        times = [f"{x.forward:.0f}", f"{x.backward:.0f}"]
        times += [f"{x.flash_forward:.0f} + {x.flash_backward:.0f}", f"{x.ratio:.2f}"]
        if target != "sm_100":
            assert [target, window.replace("|", "\\|"), *times] in lines


def check(jobs: list, tmp_path: Path) -> None:
    rows = list(compile_rows(jobs, processes=2, cache=tmp_path))
    assert list(dict.fromkeys(row.key[:4] for row in rows)) == jobs
    assert find_regressions(ROWS, rows) == []


@needs_same_compiler
@pytest.mark.parametrize("jobs", cases([SAMPLE[:2], SAMPLE], [SAMPLE[:2]], slow=[SAMPLE]), ids=len)
def test_kernels_take_no_more_than_in_the_table(jobs, tmp_path):
    check(jobs, tmp_path)


@needs_same_compiler
@pytest.mark.slow
def test_no_kernel_takes_more_than_in_the_table(tmp_path):
    check(JOBS, tmp_path)


def test_regressions_are_found():
    row = next(row for row in ROWS if row.key[:4] == JOBS[0])
    assert find_regressions(ROWS, [row]) == []
    worse = replace(row, resources=replace(row.resources, spilled=8, scalar_matmuls=1), blocks=1)
    found = find_regressions(ROWS, [worse])
    assert [text.partition(": ")[2] for text in found] == [
        "8 spilled bytes, 0 in the table",
        "1 scalar matmuls, 0 in the table",
        f"1 blocks per SM, {row.blocks} in the table",
    ]
    assert "is not in the table" in find_regressions(ROWS, [replace(row, head_dim=40)])[0]
    better = replace(row, blocks=row.blocks + 1)
    assert find_regressions(ROWS, [better]) == []


def test_a_table_is_written_and_read(tmp_path):
    file = tmp_path / "table.json"
    write_table(file, ROWS[:3], ABOUT)
    assert read_table(file) == (ROWS[:3], ABOUT)
    for text in ('{"about": {}, "rows": [{"target": "sm_80"}]}', "[]"):
        file.write_text(text)
        with pytest.raises(ValueError, match="not a table of kernels"):
            read_table(file)


@pytest.mark.long
def test_the_script_prints_a_table_and_its_predictions():
    command = [sys.executable, "benchmarks/kernels.py", "--read", "benchmarks/results/kernels.json"]
    command += ["--targets", "sm_90", "--head-dims", "64", "--dtypes", "float16"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = [r for r in ROWS if (r.target, r.dtype, r.head_dim) == ("sm_90", "float16", 64)]
    assert format_rows(rows) in run.stdout
    for prediction in predict_rows(rows).values():
        assert f"{prediction.ratio:.2f}" in run.stdout
