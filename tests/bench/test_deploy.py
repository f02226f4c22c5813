"""`vil benchmark deploy`: what it measures, which paths it refuses, what it writes."""

import argparse
import csv
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.common.small_runs import TINY, vil
from vil.bench.deploy import PATHS, Deployment, Row, Subject, compare_paths, predict
from vil.cli.benchmark_deploy import add_arguments, find_model
from vil.config import get_config, override
from vil.ops.dispatch import CHOICES
from vil.ops.tuning import tuning_cache
from vil.pretrained.catalog import DIGITS
from vil.utils.resident_memory import resident_growth
from vil.workflows import benchmark_deploy, configure
from vil.workflows.benchmark_deploy import published_top1

MIB = 2**20
WEIGHTS = ("--config-file", "digits/vil_nano.yaml", "MODEL.MODEL_PATH", str(DIGITS.url))
MODEL = (*TINY, "SOLVER.WARMUP_EPOCHS=0")
QUICK = ("--rounds", "1", "--images", "40", "--batches", "1,4", "--out", "d", "--no-tune")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
    return Subject("bright", Brightness(), (8, 8), images, tmp_path, images, targets)


def compare(subject, *paths, least=97.0):
    options = dict(batches=(1, 4), rounds=2, least_agreement=least, say=lambda text: None)
    return compare_paths([subject], ("eager", *paths), **options)


def test_a_path_that_disagrees_is_refused(subject, monkeypatch):
    """By name, with the share of images, and without a speed."""

    def dark(subject):
        return Deployment(lambda: lambda x: torch.tensor([[1.0, 0.0]]).expand(len(x), 2), 0)

    monkeypatch.setitem(PATHS, "dark", dark)
    eager, row = compare(subject, "dark")
    share = 10.0 * (subject.targets == 0).sum().item()
    assert (eager.agreement, eager.top1) == (100, 100)
    assert (row.agreement, row.top1) == (share, share)
    assert row.reason == (
        f"not timed: predicts the same class as eager on {share:.1f} % of 10 images, less than 97 %"
    )
    assert row.speed == {}
    assert set(eager.speed) == {1, 4}
    _, row = compare(subject, "dark", least=share)
    assert set(row.speed) == {1, 4}


def test_a_path_of_nans_is_refused(subject, monkeypatch):
    monkeypatch.setitem(
        PATHS, "nan", lambda subject: Deployment(lambda: lambda x: x.mean((2, 3)) * torch.nan, 0)
    )
    assert compare(subject, "nan", least=0)[1].reason == "not timed: some logits are not finite"


def test_a_path_of_nans_is_refused_without_eager(subject, monkeypatch):
    monkeypatch.setitem(PATHS, "eager", lambda subject: 1 / 0)
    monkeypatch.setitem(
        PATHS, "nan", lambda subject: Deployment(lambda: lambda x: x.mean((2, 3)) * torch.nan, 0)
    )
    row = compare(subject, "nan")[1]
    assert (row.reason, row.speed) == ("not timed: some logits are not finite", {})


def test_a_path_that_fails_has_a_reason(subject, monkeypatch):
    def fails(subject):
        raise ValueError("no such thing")

    monkeypatch.setitem(PATHS, "fails", fails)
    _, row, fast = compare(subject, "fails", "fast")
    assert row == Row("bright", "fails", reason="ValueError: no such thing")
    assert fast.agreement == 100


def test_the_last_batch_is_filled_up(subject):
    seen = []

    def run(images):
        seen.append(len(images))
        return subject.model(images)

    logits = predict(run, subject.images, 4)
    assert seen == [4, 4, 4]
    assert torch.equal(logits, subject.model(subject.images))


def test_resident_growth():
    """What is loaded and kept, and the peak of a use, whatever was freed before."""
    _, grown = resident_growth(lambda: torch.ones(64 * MIB // 4), lambda x: x + x)
    assert grown == pytest.approx(128 * MIB, abs=8 * MIB)


@pytest.mark.long
def test_a_model_with_weights():
    """Predictions are compared, and everything is written."""
    paths = "fast,fast+bf16,onnx,onnx+int8,onnx+int8+static"
    ended = vil("benchmark", "deploy", *WEIGHTS, *QUICK, "--paths", paths)
    assert ended.code == 0, ended.err
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
    assert Path("d/deploy.png").stat().st_size > 0
    assert "agree %" in ended.out


@pytest.mark.long
def test_models_without_weights():
    """Only speed, memory and size; no plot without accuracies."""
    words = ("--paths", "bf16", "--beside", "timm/vit_tiny_patch16_224")
    ended = vil("benchmark", "deploy", *MODEL, *QUICK, *words, "INPUT.IMAGE_SIZE=224")
    assert ended.code == 0, ended.err
    rows = json.loads(Path("d/deploy.json").read_text())["rows"]
    assert [row["model"] for row in rows[1:]] == [rows[0]["model"]] + 2 * [
        "timm/vit_tiny_patch16_224"
    ]
    assert {(row["agreement"], row["published"]) for row in rows} == {(None, None)}
    assert not Path("d/deploy.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--paths", "onnx+int9"), "path 'onnx+int9'"),
        (("--batches", "0"), "--batches: expected an integer of at least 1, got '0'"),
        (("--agreement", "101"), "--agreement: expected a number from 0 to 100, got 101"),
        (("--calibration", "no"), "--calibration: there is no folder no"),
        (("TASK=multilabel",), "vil benchmark deploy measures only classifiers"),
    ],
)
def test_command_lines_that_cannot_be(words, said):
    ended = vil("benchmark", "deploy", *MODEL, *QUICK, *words)
    assert ended.code == 2
    assert said in ended.err
    assert not Path("d").exists()


@pytest.mark.slow
def test_compiled_paths(subject):
    rows = compare(subject, "compile", "fast+bf16+compile", "aoti")
    assert [row.reason for row in rows] == [""] * 4


def test_published_accuracies_belong_to_unchanged_models():
    cfg, _ = configure.resolve("imagenet/vil_tiny.yaml", configure.Options())
    assert published_top1("vil_tiny", cfg) == 76.3
    assert published_top1("vil_small", cfg) is None
    assert published_top1("vil_tiny", override(cfg, ["INPUT.IMAGE_SIZE=384"])) is None
    assert published_top1("vil_tiny", override(cfg, ["MODEL.ARCH=timm/resnet18"])) is None
    linformer = override(cfg, ["MODEL.VIT.MSVIT.ATTN_TYPE=linformer"])
    assert published_top1("vil_tiny", linformer) is None
    assert published_top1("timm/unknown", cfg) is None


def model_of(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return find_model(parser.parse_args(words))


def test_a_model_has_its_own_name():
    assert model_of()[1] == "vil_tiny"
    assert model_of("MODEL.ARCH=timm/resnet18")[1] == "timm/resnet18"


def test_weights_need_no_config_if_they_describe_their_model():
    cfg, name, classes = model_of(f"MODEL.MODEL_PATH={DIGITS.url}")
    wanted, _, _ = model_of(*WEIGHTS)
    assert cfg.MODEL.VIT.MSVIT.ARCH == wanted.MODEL.VIT.MSVIT.ARCH
    assert name == Path(DIGITS.url).stem
    assert classes == [str(digit) for digit in range(10)]
    other, _, _ = model_of("MODEL.MODEL_PATH=undescribed.pth")
    assert other.MODEL.VIT.MSVIT.ARCH == model_of()[0].MODEL.VIT.MSVIT.ARCH


def test_with_a_config_file_the_classes_are_those_of_the_weights():
    cfg, name, classes = model_of(*WEIGHTS)
    settings = benchmark_deploy.DeploySettings(paths=("eager",))
    benchmark = benchmark_deploy.DeployBenchmark(cfg, name, settings, class_names=classes)
    assert benchmark.class_names == [str(digit) for digit in range(10)]


def test_classes_of_a_model_without_weights_are_counted(tmp_path):
    cfg = get_config(None, [*MODEL, "DATA.NUM_CLASSES=auto"])
    settings = benchmark_deploy.DeploySettings(paths=("eager",), batches=(1,))
    benchmark = benchmark_deploy.DeployBenchmark(cfg, "tiny", settings)
    assert benchmark.open_model(tmp_path).model.head.out_features == 4


def test_tuned_backends_of_all_batch_sizes_are_used(monkeypatch):
    def load(device):
        CHOICES["a call"] = "native"

    def compare(*args, **more):
        assert CHOICES == {"a call": "native"}
        raise StopIteration

    monkeypatch.setattr(tuning_cache, "load", load)
    monkeypatch.setattr(benchmark_deploy, "compare_paths", compare)
    settings = benchmark_deploy.DeploySettings(paths=("eager",), batches=(1,))
    cfg = get_config(None, [*MODEL, "DEVICE=cpu"])
    benchmark = benchmark_deploy.DeployBenchmark(cfg, "tiny", settings, beside=["timm/resnet18"])
    with pytest.raises(StopIteration):
        benchmark.run()
