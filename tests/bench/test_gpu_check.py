"""The ranking of backends by their times, which needs no GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "benchmarks/results/attention-cpu/attention.json"


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
