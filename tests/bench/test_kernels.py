"""The Triton kernels, compiled for GPUs: few spills, every matmul runs on tensor cores."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from vil.ops.backends.triton.launches import find_launch

ROOT = Path(__file__).parent.parent.parent
TABLE = json.loads((ROOT / "benchmarks/results/kernels.json").read_text())
needs_same_compiler = pytest.mark.skipif(
    find_spec("triton") is None or version("triton") != TABLE["about"]["triton"],
    reason="another version of triton compiles other kernels",
)


def key(row: dict) -> tuple:
    return tuple(row[name] for name in ("target", "window", "dtype", "head_dim", "kernel"))


def test_the_table_promises_fast_kernels():
    assert {row["target"] for row in TABLE["rows"]} == {"sm_80", "sm_90", "sm_100"}
    for row in TABLE["rows"]:
        assert row["scalar_matmuls"] == 0, row
        assert row["blocks"] >= 2, row
        if row["window"].startswith("chunks") and row["kernel"] != "global":
            launch = find_launch(row["target"], row["kernel"], row["head_dim"], 2, tf32=False)
            assert row["spilled"] <= (100 if launch.registers else 0), row


@needs_same_compiler
@pytest.mark.long
def test_the_kernels_are_still_those_of_the_table(tmp_path):
    file = tmp_path / "kernels.json"
    command = [sys.executable, "benchmarks/kernels.py", "--head-dims", "64", "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before = {key(row): row for row in TABLE["rows"]}
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) > 20
    for row in rows:
        old = before[key(row)]
        for name in ("spilled", "scalar_matmuls"):
            assert row[name] <= old[name], (name, row, old)
        assert row["blocks"] >= old["blocks"], (row, old)
        assert row["per_tile"] <= 1.05 * old["per_tile"], (row, old)
