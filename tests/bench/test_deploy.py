"""benchmarks/deploy.py: what it measures, which paths it refuses, what it writes."""

import csv
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.common.small_runs import TINY
from vil.errors import ConfigError
from vil.pretrained.catalog import DIGITS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # scripts, not part of the package
deploy = importlib.import_module("deploy")

WEIGHTS = ("--config-file", "digits/vil_nano.yaml", "MODEL.MODEL_PATH", str(DIGITS.url))
MODEL = (*TINY, "SOLVER.WARMUP_EPOCHS=0")
QUICK = ("--rounds", "1", "--images", "40", "--batches", "1,4", "--out", "d")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words):
    command = [sys.executable, BENCHMARKS / "deploy.py", *words]
    return subprocess.run(command, capture_output=True, text=True)


class Brightness(nn.Module):
    """Two classes: dark and bright."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images):
        mean = self.scale * images.mean((1, 2, 3))
        return torch.stack([-mean, mean], 1)


@pytest.fixture
def subject(tmp_path):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(10, 3, 8, 8, generator=generator)
    targets = (images.mean((1, 2, 3)) > 0).long()
    return deploy.Subject("bright", Brightness(), (8, 8), images, tmp_path, images, targets)


def compare(subject, *paths, least=97.0):
    options = dict(batches=(1, 4), rounds=2, least_agreement=least)
    return deploy.compare_paths([subject], ("eager", *paths), **options)


@pytest.mark.long
def test_a_path_that_disagrees_is_refused(subject, monkeypatch):
    """By name, with the share of images, and without a speed."""

    def dark(subject):
        logits = torch.tensor([[1.0, 0.0]])
        return deploy.Deployment(lambda: lambda x: logits.expand(len(x), 2), 0)

    monkeypatch.setitem(deploy.PATHS, "dark", dark)
    eager, row = compare(subject, "dark")
    share = 10.0 * (subject.targets == 0).sum().item()
    assert (eager.agreement, eager.top1) == (100, 100)
    assert (row.agreement, row.top1) == (share, share)
    assert row.reason.startswith(f"not timed: predicts the same class as eager on {share:.1f} %")
    assert row.speed == {}
    assert set(eager.speed) == {1, 4}
    _, row = compare(subject, "dark", least=share)
    assert set(row.speed) == {1, 4}


@pytest.mark.long
def test_a_path_of_nans_is_refused(subject, monkeypatch):
    def nan(subject):
        return deploy.Deployment(lambda: lambda x: x.mean((2, 3)) * torch.nan, 0)

    monkeypatch.setitem(deploy.PATHS, "nan", nan)
    assert compare(subject, "nan", least=0)[1].reason == "not timed: some logits are not finite"


@pytest.mark.long
def test_a_path_that_fails_has_a_reason(subject, monkeypatch):
    def fails(subject):
        raise ValueError("no such thing")

    monkeypatch.setitem(deploy.PATHS, "fails", fails)
    _, row, fast = compare(subject, "fails", "fast")
    assert row.reason == "ValueError: no such thing"
    assert fast.agreement == 100


@pytest.mark.long
def test_a_model_with_weights():
    """Predictions are compared, and everything is written."""
    paths = "fast,fast+bf16,onnx,onnx+int8,onnx+int8+static"
    done = run(*WEIGHTS, *QUICK, "--paths", paths)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path("d/deploy.json").read_text())["rows"]
    assert [row["path"] for row in rows] == ["eager", *paths.split(",")]
    for row in rows:
        assert row["agreement"] >= 97
        assert row["top1"] > 90
        assert row["images_per_second_1"] > 0
        assert row["images_per_second_4"] > 0
        assert row["memory_mib"] > 0
        assert row["reason"] == ""
    sizes = {row["path"]: row["size_mib"] for row in rows}
    assert sizes["fast+bf16"] == sizes["eager"] / 2
    assert sizes["onnx+int8+static"] < sizes["onnx"]
    lines = csv.DictReader(Path("d/deploy.csv").read_text().splitlines())
    assert [line["path"] for line in lines] == [row["path"] for row in rows]
    assert "agree %" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--paths", "onnx+int9"), "path 'onnx+int9'"),
        (("--calibration", "no"), "--calibration: there is no folder no"),
        (("TASK=multilabel",), "this config is for a multilabel classifier"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(words, said):
    arguments = deploy.make_arguments().parse_intermixed_args([*MODEL, *QUICK, *words])
    with pytest.raises(ConfigError, match=re.escape(said)):
        deploy.run(arguments)
    assert not Path("d").exists()
