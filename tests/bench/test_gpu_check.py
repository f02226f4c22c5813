"""The parts of scripts/gpu_check.sh that need no GPU: registers beside the table, the ranking."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vil.bench.kernel_device import Loaded, compare, load_kernels
from vil.bench.kernel_table import read_table

ROOT = Path(__file__).parent.parent.parent
ROWS, _ = read_table(ROOT / "benchmarks/results/kernels.json")
RESULT = ROOT / "benchmarks/results/attention-cpu/attention.json"


def test_loaded_kernels_are_beside_their_rows():
    same, other = ROWS[0], ROWS[1]
    loaded = [
        Loaded(same.key, same.resources.registers, same.resources.spilled),
        Loaded(other.key, 255, 16),
        Loaded(("sm_89", *same.key[1:]), 40, 0),
    ]
    lines = compare(loaded, ROWS).splitlines()
    assert lines[1].split()[-4:] == [str(same.resources.registers)] * 2 + ["0", "0"]
    assert lines[2].split()[-4:] == ["255", str(other.resources.registers), "16", "0"]
    assert lines[3].split()[-4:] == ["40", "-", "0", "-"]
    assert lines[4] == "3 kernels, 1 differ from the table, 1 are not in it"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_loading_without_a_gpu_is_refused():
    with pytest.raises(RuntimeError, match="use a machine with a CUDA device"):
        next(load_kernels([("chunks, w 8", "bfloat16", 64)]))


@pytest.mark.gpu
def test_the_driver_takes_what_the_table_says():
    loaded = list(load_kernels([("chunks, w 8", "bfloat16", 64)]))
    assert len(loaded) == 5
    assert all(kernel.spilled == 0 for kernel in loaded)


@pytest.mark.long
def test_backends_are_ranked_by_their_times():
    command = [sys.executable, "benchmarks/preference.py", str(RESULT)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    order = re.search(r"by these times: +(.*)", run.stdout)[1].split(", ")
    rows = [row for row in json.loads(RESULT.read_text())["rows"] if not row["reason"]]
    assert set(order) <= {row["backend"] for row in rows}
    assert order[0] == "blocked"  # the fastest in most of these cases
    mean = [float(line.split()[2]) for line in run.stdout.splitlines()[1 : 1 + len(order)]]
    assert mean == sorted(mean)
    assert mean[0] >= 1
