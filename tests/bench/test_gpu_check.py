"""scripts/gpu_check.sh runs without a GPU, and with only those packages that a GPU machine has."""

import json
import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FEW = ("torch", "torchvision", "triton", "timm", "numpy", "pytest", "yacs")
CORE = (*FEW, "tensorboard", "matplotlib", "rich", "jinja2", "scikit-learn", "setuptools")
HIDE = """
import sys
from importlib.machinery import PathFinder

class Hide(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {names}
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hide if finder is PathFinder else finder for finder in sys.meta_path]
"""


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_dependencies(names: tuple[str, ...]) -> set[str]:
    """The distributions and all that they require, without extras."""
    found, pending = set(), [*names]
    while pending:
        name = normalize(pending.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # for another platform
            continue
        pending += [re.match(r"[\w.-]+", text)[0] for text in needed if "extra ==" not in text]
    return found


def run_script(folder: Path, steps: str, packages: tuple[str, ...]) -> list[dict]:
    """Run steps with only these packages. Returns the rows of numbers."""
    allowed = with_dependencies(packages) | {"vil"}
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if allowed.isdisjoint(map(normalize, owners))
    }
    assert {"pyarrow", "onnxruntime", "zarr"} <= hidden
    (folder / "sitecustomize.py").write_text(HIDE.format(names=sorted(hidden)))
    command = ["scripts/gpu_check.sh", "--dry", "--out", str(folder / "out"), "--steps", steps]
    # plugins of pytest are found by their metadata, which is not hidden
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, "PYTHONPATH": str(folder), **plugins}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    log = (folder / "out/log.txt").read_text()
    assert not re.findall(r"^## .*exit code [^0].*|Traceback.*|.*no time left", log, re.M), log
    assert (folder / "out/results.tgz").stat().st_size > 100
    return [json.loads(line) for line in (folder / "out/rows.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_kernels_and_models_are_measured_with_few_packages(tmp_path):
    rows = run_script(tmp_path, "tests exact table tuned", FEW)
    assert not [row for row in rows if "error" in row]
    wanted = {"machine", "ceilings", "exact", "attention", "model", "step"}
    assert wanted <= {row["what"] for row in rows}
    log = (tmp_path / "out/log.txt").read_text()
    assert int(re.search(r"tests/ops/test_triton.py: (\d+)", log)[1]) > 50


@pytest.mark.long
def test_trainings_are_measured_with_the_required_packages(tmp_path):
    rows = run_script(tmp_path, "syncs trained", CORE)
    assert not [row for row in rows if "error" in row]
    found = {row["what"]: row for row in rows}
    assert found["syncs"]["count"] == 0
    assert found["syncs"]["stopped"]
    assert found["resume"]["equal_bits"]
    assert found["recipe"]["best"] > 10
    assert found["train-eager"]["img/s"] > 0


@pytest.mark.long
def test_a_step_that_hangs_or_fails_stops_nothing(tmp_path):
    program = tmp_path / "bin/nvidia-smi"  # which the first step runs
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    command = ["scripts/gpu_check.sh", "--dry", "--out", str(tmp_path / "out"), "--budget", "6"]
    command += ["--steps", "nothing recipes"]
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = re.findall(r"^## (.*exit code \d+|unknown.*|.*no time left)", run.stdout, re.M)
    assert said == ["versions: exit code 124", "unknown step nothing", "recipes: no time left"]
    assert (tmp_path / "out/results.tgz").stat().st_size > 100
