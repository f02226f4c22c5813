"""The commands do what their help promises."""

import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.common.small_runs import (
    FOLDER,
    SMALL,
    TINY,
    checkpoint,
    draw_pictures,
    figures,
    metrics,
    numbers,
    results,
    succeeds,
    vil,
)
from vil.config import get_config
from vil.data.transforms import train_transform
from vil.tasks.image.class_metrics import metric_names
from vil.tasks.image.task import ImageTask
from vil.workflows.backends import find_calls

FIGURES = metric_names(4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three epochs whose best weights are not its last ones."""
    folder = tmp_path_factory.mktemp("run") / "run"
    succeeds("train", *TINY, "OPTIM.EPOCHS=3", "OPTIM.LR=0.1", "--output_dir", folder)
    return folder


def best_and_last(folder):
    """The lines of metrics.jsonl that the two checkpoints come from."""
    steps = {line["step"]: line for line in metrics(folder, "val/fake")}
    return {
        name: steps[int(checkpoint(folder, name).name.removeprefix("step-"))]
        for name in ("best", "last")
    }


# analyze, info


def test_commands_that_need_no_data_ask_for_none(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    recipe, small = "own/vil_nano_96.yaml", (SMALL[-1], "DEVICE=cpu")
    assert find_calls(get_config(recipe, small)).attention  # what `vil info` and `vil tune` do
    own = ("--config-file", recipe, *small)
    assumed = succeeds("analyze", *own)
    assert caplog.text.count("the model is built with 2") == 2
    draw_pictures("photos", {"train/a": 1, "train/b": 1, "train/c": 1})
    assert succeeds("analyze", *own, "--data", "photos") != assumed
    assert caplog.text.count("the model is built with") == 2


def test_analyze_prints_the_published_count():
    """ViL-Tiny's: the default config is it, with relative bias."""
    *_, stages, total = succeeds("analyze").splitlines()
    assert total.split()[:2] == ["total", "6,719,698"]
    assert stages.split()[0] == "head"


def test_info_names_the_machine_and_a_backend_per_sparse_stage():
    shown = succeeds("info", "--all", *TINY)
    assert f"torch {version('torch')}" in shown
    assert "device cpu" in shown
    assert re.search(r"^stage 1: .*\b8 x 8 tokens", shown, re.MULTILINE)
    stages = re.findall(r"^stage (\d): .*, (\w+)$", shown, re.MULTILINE)
    assert stages == [("1", "training"), ("1", "evaluation")]  # stage 2 is not sparse
    assert len(re.findall(r"\bchosen\b", shown)) == 2
    pinned = succeeds("info", "--all", *TINY, "MODEL.VIT.MSVIT.BACKEND=masked")
    assert re.search(r"masked +chosen", pinned)


# train


def test_a_run_s_folder_is_complete(run):
    found = {entry.name for entry in run.iterdir()}
    assert found >= {
        "config.yaml", "command.txt", "env.txt", "status.json", "log.txt", "metrics.jsonl", "tb",
        "checkpoints", "plots",
    }  # fmt: skip
    for pointer in ("best", "last"):
        held = {file.name for file in checkpoint(run, pointer).iterdir()}
        assert held == {"model.safetensors", "state.pt", "manifest.json", "manifest.sha256"}
    for plot in ("loss", "accuracy", "lr"):
        Image.open(run / f"plots/{plot}.png").verify()
    assert list(run.glob("tb/events.*"))
    assert f"torch {version('torch')}" in (run / "env.txt").read_text()
    assert not list(run.rglob("*.tmp"))


@pytest.mark.long
@pytest.mark.smoke
@pytest.mark.defect("B30")
def test_the_same_command_gives_the_same_numbers(run, tmp_path):
    words = [*TINY, "OPTIM.EPOCHS=3", "OPTIM.LR=0.1"]
    succeeds("train", *words, "--output_dir", "again")
    assert figures(metrics("again")) == figures(metrics(run))
    succeeds("train", *words, "--output_dir", "other", "--seed", "1", "OPTIM.EPOCHS=1")
    assert figures(metrics("other"))[0] != figures(metrics(run))[0]


def test_resuming_says_what_changed_and_takes_the_folder_s_config():
    assert vil("train", *TINY, "OPTIM.EPOCHS=1", "--output_dir", "run").code == 0
    ended = vil("train", *TINY, "OPTIM.LR=0.02", "--output_dir", "run", "--resume")
    assert ended.code == 0
    assert "OPTIM.LR is 0.02 from here, was 0.01" in ended.out
    assert "OPTIM.EPOCHS is 2 from here, was 1" in ended.out
    ended = vil("train", "--output_dir", "run", "--resume", "OPTIM.EPOCHS=3")
    assert ended.code == 0, ended.err
    assert "from here" in ended.out
    assert "OPTIM.LR is" not in ended.out
    ended = vil("train", "OUTPUT_DIR=run", "--resume", "OPTIM.EPOCHS", "4")
    assert ended.code == 0, ended.err
    assert "OPTIM.EPOCHS is 4 from here, was 3" in ended.out


def test_mixed_precision_in_channels_last():
    """bfloat16 in training and in evaluation: near the full precision, and not the same."""
    lines = {}
    settings = {"full": [], "mixed": ["AMP.ENABLED=True", "AMP.MEMORY_FORMAT=nhwc"]}
    for name, words in settings.items():
        succeeds("train", *TINY, "OPTIM.EPOCHS=1", *words, "--output_dir", name)
        lines[name] = metrics(name)
    for full, mixed in zip(lines["full"], lines["mixed"], strict=True):
        assert full["loss"] != mixed["loss"]
        assert full["loss"] == pytest.approx(mixed["loss"], rel=0.02)
    dtypes = {tensor.dtype for tensor in weights("mixed").values()}
    assert dtypes == {torch.float32}


def weights(folder, name="last"):
    return load_file(checkpoint(folder, name) / "model.safetensors")


# evaluate


@pytest.mark.parametrize("name", ["best", "last"])
def test_evaluate_repeats_the_metrics_of_training(run, name):
    """To the last digit: it is the same computation."""
    steps = best_and_last(run)
    assert steps["best"]["top1"] > steps["last"]["top1"]
    trained = steps[name]
    given = () if name == "best" else ("--checkpoint", name)  # the best one if not told
    shown = succeeds("evaluate", "--run", run, *given)
    assert results(run)["fake"] == {figure: trained[figure] for figure in FIGURES}
    line = shown.splitlines()[-1]
    assert line.startswith("val set fake ")
    assert numbers(line, "loss", "top1") == {
        "loss": f"{trained['loss']:.4f}", "top1": f"{trained['top1']:.2f}",
    }  # fmt: skip


@pytest.mark.defect("B9")
def test_evaluation_by_the_original_s_switch(run):
    """train EVALUATE True MODEL.MODEL_PATH ..., as the 2021 launchers do it."""
    words = ["EVALUATE", "True", "MODEL.MODEL_PATH", checkpoint(run, "last")]
    succeeds("train", *TINY, *words, "--output_dir", "out")
    assert results("out")["fake"]["loss"] == best_and_last(run)["last"]["loss"]
    assert [entry.name for entry in Path("out").iterdir()] == ["eval"]


# Fine-tuning


def test_a_head_of_another_size_needs_a_decision(run):
    five = ["DATA.NUM_CLASSES=5", "DATA.KWARGS.num_classes=5", "OPTIM.EPOCHS=1"]
    start = [*TINY, *five, f"MODEL.MODEL_PATH={checkpoint(run)}", "--output_dir", "tuned"]
    ended = vil("train", *start)
    assert ended.code == 4
    assert "mismatched: head.weight (4, 32) -> (5, 32)" in ended.err
    assert not Path("tuned").exists()

    shown = succeeds("train", *start, "FINETUNE.HEAD=new", "OPTIM.LR=1e-9")
    assert "2 fresh" in shown.splitlines()[0]
    ours, theirs = weights("tuned"), weights(run)
    assert ours["head.weight"].shape == (5, 32)
    assert evaluated_again("tuned") in shown  # with the head it trained, not with another new one
    for name in theirs.keys() - {"head.weight", "head.bias"}:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_a_random_head_is_never_evaluated(run):
    ended = vil("evaluate", "--run", run, "FINETUNE.HEAD=new")
    assert ended.code == 4
    assert "random head" in ended.err


def test_a_damaged_checkpoint_is_never_evaluated(run):
    shutil.copytree(run, "damaged")
    file = max(Path("damaged").glob("checkpoints/*/model.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    ended = vil("evaluate", "--run", "damaged", "--checkpoint", "last")
    assert ended.code == 4
    assert "model.safetensors" in ended.err


def evaluated_again(folder) -> str:
    """Return the first metrics that `evaluate` prints for the last checkpoint."""
    shown = succeeds("evaluate", "--run", folder, "--checkpoint", "last")
    return re.search(r"set fake loss \S+ top1 \S+", shown)[0]


# Pictures that cannot be read


@pytest.fixture
def pets():
    """40 training and 8 validation images."""
    return draw_pictures("pets", {"train/cat": 20, "train/dog": 20, "val/cat": 4, "val/dog": 4})


def spoil(pets):
    """Break three training images (truncated, empty, text) and a validation image."""
    cut = pets / "train/cat/3.png"
    cut.write_bytes(cut.read_bytes()[:60])
    (pets / "train/dog/5.png").write_bytes(b"")
    (pets / "train/dog/7.png").write_text("Dear Sir or Madam")
    (pets / "val/cat/1.png").write_text("once more")


def test_unreadable_images_are_counted_and_training_continues(pets):
    spoil(pets)
    words = ["--data", pets, "DATA.MAX_BAD_FRACTION=0.2", "--output_dir", "out"]
    shown = succeeds("train", *SMALL, *FOLDER, *words, "DATALOADER.BSZ=8")
    listed = [line.split("\t")[0] for line in Path("out/bad_samples.txt").read_text().splitlines()]
    spoilt = ["train/cat/3.png", "train/dog/5.png", "train/dog/7.png", "val/cat/1.png"]
    assert sorted(listed) == spoilt
    assert all(f"so far): {name}: " in shown for name in spoilt)
    assert len(shown.splitlines()) == len(Path("out/log.txt").read_text().splitlines())
    assert [line["count"] for line in metrics("out", "val")] == [7, 7]  # of those that can be read
    assert metrics("out", "train")[-1]["step"] == 10


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m9-mstd0.5-inc1", "v0", "augmix-m5"])
def test_policies_work_on_every_image(policy):
    """At magnitude 10, posterize keeps 0 bits, which Pillow 13 refuses: 1 image in 700."""
    transform = train_transform(16, use_timm=True, auto_augment=policy)
    picture = Image.new("RGB", (16, 16), (200, 100, 50))
    for _ in range(300):
        assert transform(picture).shape == (3, 16, 16)


def test_a_missing_extra_is_refused_before_work(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    def build(*_, **__):
        raise AssertionError("the model was built")

    monkeypatch.setattr(ImageTask, "build_model", build)
    table = ("DATA.TRAIN=a.parquet", "DATA.TEST=a.parquet", "DATA.NUM_CLASSES=10", "DATA.KWARGS={}")
    for words in (("train", *SMALL, *table), ("evaluate", "--run", run, "DATA.TEST=a.parquet")):
        ended = vil(*words)
        assert ended.code == 3
        assert "the dataset a.parquet needs pyarrow: pip install 'vil[tables]'" in ended.err
