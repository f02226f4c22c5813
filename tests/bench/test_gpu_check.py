"""scripts/gpu_check.sh runs without a GPU, and prints numbers of every kind."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run_script(folder: Path, steps: str) -> list[dict]:
    """Return the rows of numbers of these steps."""
    command = ["scripts/gpu_check.sh", "--dry", "--out", str(folder / "out"), "--steps", steps]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    log = (folder / "out/log.txt").read_text()
    assert not re.findall(r"^## .*exit code [^0].*|Traceback.*|.*no time left", log, re.M), log
    assert (folder / "out/results.tgz").stat().st_size > 100
    return [json.loads(line) for line in (folder / "out/rows.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_kernels_and_models_are_measured(tmp_path):
    rows = run_script(tmp_path, "tests exact table tuned")
    assert not [row for row in rows if "error" in row]
    wanted = {"machine", "ceilings", "exact", "attention", "model", "step"}
    assert wanted <= {row["what"] for row in rows}
    log = (tmp_path / "out/log.txt").read_text()
    assert int(re.search(r"tests/ops/test_triton.py: (\d+)", log)[1]) > 50


@pytest.mark.long
def test_trainings_are_measured(tmp_path):
    rows = run_script(tmp_path, "syncs trained")
    assert not [row for row in rows if "error" in row]
    found = {row["what"]: row for row in rows}
    assert found["syncs"]["count"] == 0
    assert found["resume"]["equal_bits"]
    assert found["recipe"]["best"] > 10
    assert found["train-eager"]["img/s"] > 0


@pytest.mark.long
def test_a_step_that_hangs_or_fails_stops_nothing(tmp_path):
    command = ["scripts/gpu_check.sh", "--dry", "--out", str(tmp_path), "--budget", "30"]
    command += ["--steps", "nothing models machine exact attention recipes"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "unknown step nothing" in run.stdout
    assert "recipes: no time left" in run.stdout or "recipes: exit code 124" in run.stdout
    assert (tmp_path / "results.tgz").stat().st_size > 100
