"""Masked image modeling: masks, error, what a run learns, and what becomes of its weights."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vil
from tests.common.marks import cases
from tests.common.small_runs import metrics, succeeds
from tests.common.small_runs import vil as command
from tests.common.small_tasks import SMALL_TASKS
from vil.data.batch import Batch
from vil.data.datasets.fake import Fake
from vil.tasks.simmim.model import PixelModel
from vil.tasks.simmim.target import MaskedPixels
from vil.workflows.configure import make_config
from vil.workflows.train import train_config

MASKED = SMALL_TASKS["simmim"]


def train(folder, *words, of=MASKED, **options):
    cfg = make_config(None, [*of, *words], output_dir=folder)
    return train_config(cfg, **options)


def weights(run):
    return load_file(run.last_checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("masked") / "run")


def batch_of(indices, epoch=0, size=(32, 48)):
    images = torch.stack(
        [torch.randn(3, *size, generator=torch.Generator().manual_seed(i)) for i in indices]
    )
    return Batch(images, torch.zeros(len(indices)), torch.tensor(indices), epoch=epoch)


def masks_of(batch):
    return batch.targets[:, -1]


@pytest.mark.parametrize(("ratio", "masked"), [(0.6, 14), (0.01, 1), (0.99, 23)])
def test_a_share_of_the_squares_is_masked(ratio, masked):
    target, batch = MaskedPixels(0, seed=0, ratio=ratio, patch=8), batch_of([3, 5])
    changed = target.prepare(batch)
    assert torch.equal(changed.targets[:, :3], batch.images)
    mask = masks_of(changed)
    squares = mask.unflatten(1, (4, 8)).unflatten(3, (6, 8))
    assert torch.equal(squares.amin((2, 4)), squares.amax((2, 4)))
    assert squares.amax((2, 4)).sum((1, 2)).tolist() == [masked, masked]
    hidden = mask[:, None].bool().expand_as(batch.images)
    assert not changed.images[hidden].any()
    assert torch.equal(changed.images[~hidden], batch.images[~hidden])


def test_a_mask_depends_on_the_image_and_the_epoch_alone():
    """Not on the batch or the process that has the image."""
    target = MaskedPixels(0, seed=1, ratio=0.5, patch=8)
    both, alone = target.prepare(batch_of([3, 5])), target.prepare(batch_of([5]))
    assert torch.equal(masks_of(both)[1:], masks_of(alone))
    assert not torch.equal(*masks_of(both))
    assert not torch.equal(masks_of(alone), masks_of(target.prepare(batch_of([5], epoch=1))))
    other = MaskedPixels(0, seed=2, ratio=0.5, patch=8)
    assert not torch.equal(masks_of(alone), masks_of(other.prepare(batch_of([5]))))
    tested = [masks_of(each.prepare_test(batch_of([5]))) for each in (target, other)]
    assert torch.equal(*tested)  # runs are evaluated on the same masks


def test_the_error_is_that_of_masked_pixels():
    target = MaskedPixels(0, seed=0, ratio=0.5, patch=8)
    batch = target.prepare(batch_of([0, 1], size=(16, 16)))
    predicted = torch.randn(2, 3, 16, 16)
    errors, baselines = [], []
    for image, mask, guess in zip(batch.targets[:, :3], masks_of(batch).bool(), predicted):
        hidden, visible = image[:, mask], image[:, ~mask]
        errors.append((guess[:, mask] - hidden).abs().mean().item())
        baselines.append((visible.mean(1, keepdim=True) - hidden).abs().mean().item())
    loss = target.loss(predicted, batch, None)
    assert loss.value == pytest.approx(np.mean(errors), rel=1e-5)
    weighted = target.loss(predicted, batch, torch.tensor([3.0, 1.0]))
    assert weighted.value == pytest.approx(3 * errors[0] + errors[1], rel=1e-5)
    columns, _ = target.evaluate_batch("set", predicted, batch)
    found = target.measure("set", target.gather(target.evaluate_batch("set", predicted, batch)))
    assert columns[1] == pytest.approx(errors, rel=1e-5)
    assert columns[2] == pytest.approx(baselines, rel=1e-5)
    assert found["loss"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert found["skill"] == pytest.approx(100 * (1 - sum(errors) / sum(baselines)), rel=1e-4)
    flat = np.array([0]), np.array([0.5]), np.array([2e-8])  # a blank image
    assert target.measure("set", target.gather(type("", (), {"columns": flat})))["skill"] == 0


def test_cells_are_at_their_place_and_every_parameter_learns():
    """The bias of the layer for cells is the same square everywhere."""
    model = PixelModel(vil.get_model("vil_nano", img_size=32, num_classes=0), channels=3)
    with torch.no_grad():
        model.summary.weight.zero_()
        model.dense.weight.zero_()
        images = model(torch.randn(2, 3, 32, 64))
    square = model.dense.bias.view(3, 16, 16)
    assert torch.allclose(images, square.repeat(1, 2, 4).expand(2, -1, -1, -1))
    torch.nn.init.normal_(model.summary.weight)
    torch.nn.init.normal_(model.dense.weight)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.long
def test_a_network_learns_what_is_behind_a_square(tmp_path):
    """The upper half of an image has one color, the lower half another."""
    for split, count in (("train", 96), ("val", 8)):
        for number in range(count):
            rng = np.random.default_rng([number, len(split)])
            halves = np.repeat(rng.integers(0, 256, (2, 1, 3), np.uint8), 16, 0)
            path = tmp_path / "images" / split / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.repeat(halves, 32, 1)).save(path)
    words = [f"DATA.PATH={tmp_path}/images", "DATA.TRAIN=[images]", "DATA.TEST=[images]"]
    words += ["DATA.KWARGS={}", "OPTIM.OPT=adamw", "OPTIM.EPOCHS=20", "OPTIM.LR=3e-3"]
    words += ["SIMMIM.PATCH=8", "DATALOADER.BSZ=8", "DATALOADER.WORKERS=0", "AUG.SCALE=[1.0,1.0]"]
    run = train(tmp_path / "run", *words)
    assert run.metrics["images"]["skill"] > 10
    assert run.metrics["images"]["count"] == 8


LONG_OPTIONS = [
    ("OPTIM.EMA=0.9", "OPTIM.ACCUMULATE=2"),
    ("MODEL.ARCH=timm/test_vit", "INPUT.IMAGE_SIZE=160", "MODEL.PATCH_ATTENTION=window=3"),
    ("AMP.ENABLED=True", "SIMMIM.PATCH=4"),
]
OPTIONS = [
    ("MODEL.ARCH=timm/test_resnet", "OPTIM.LAYER_DECAY=0.8", "SIMMIM.PATCH=8"),
    ("INPUT.CHANNELS=5", "SIMMIM.RATIO=0.9", "INPUT.MEAN=[0.5]", "INPUT.STD=[0.5]"),
    *LONG_OPTIONS,
]


@pytest.mark.parametrize("words", cases(OPTIONS, LONG_OPTIONS), ids=" ".join)
def test_options_of_a_run(words, tmp_path):
    run = train(tmp_path / "run", *words, "DATA.KWARGS.n=32")
    losses = [line["loss"] for line in metrics(run.run_dir, "train")]
    assert losses[-1] < losses[0]
    assert vil.evaluate(run.run_dir, checkpoint="last") == run.metrics


STARTED = {"simmim": "body.", "classification": "", "segmentation": "body."}


# as the network of a student, in tests/tasks/distillation
@pytest.mark.parametrize("task", cases(STARTED, long=("classification", "segmentation")))
def test_its_network_starts_other_tasks(task, trained, tmp_path):
    """Without the layers that predict pixels; and one run continues from another."""
    path, own, prefix = f"MODEL.MODEL_PATH={trained.run_dir}", weights(trained), STARTED[task]
    body = {n.removeprefix("body."): x for n, x in own.items() if n.startswith("body.")}
    words = [path, "OPTIM.LR=1e-12", "OPTIM.EPOCHS=1"]
    words += ["FINETUNE.HEAD=new"] if task != "simmim" else []
    loaded = weights(train(tmp_path / task, *words, of=SMALL_TASKS[task], max_steps=1))
    kept = {n: x for n, x in body.items() if prefix + n in loaded}
    assert all(torch.allclose(loaded[prefix + n], x) for n, x in kept.items())
    assert len(kept) >= len(body) - (2 if task == "segmentation" else 0)  # the final norm
    if task == "simmim":
        assert torch.allclose(loaded["dense.weight"], own["dense.weight"])


def test_it_can_be_a_teacher(trained, tmp_path):
    words = [f"DISTILL.TEACHER={trained.run_dir}"]
    run = train(tmp_path / "student", *words, of=SMALL_TASKS["distillation"], max_steps=2)
    assert run.step == 2


def test_features_are_those_of_the_whole_image(trained, tmp_path):
    image = Fake(None, "val", n=1, size=32).image(0)
    features = vil.embed(trained.run_dir, [image])
    (prediction,) = vil.predict(trained.run_dir, image)
    assert prediction.features == pytest.approx(features[0].tolist(), rel=1e-6)
    with pytest.raises(vil.errors.ConfigError, match="SIMMIM.PATCH 5"):
        vil.evaluate(trained.run_dir, ["SIMMIM.PATCH=5"])
    assert np.array_equal(vil.embed(trained.run_dir, [image], ["SIMMIM.PATCH=5"]), features)
    succeeds("convert", trained.run_dir, tmp_path / "file.safetensors")
    assert np.array_equal(vil.embed(tmp_path / "file.safetensors", [image]), features)


@pytest.mark.parametrize("task", ["simmim", "distillation"])
def test_sets_with_other_classes_are_one_training_set(task, tmp_path):
    """Images without labels, and images of three classes."""
    (tmp_path / "train").mkdir()
    for number in range(4):
        Fake(None, "train", n=4, size=32).image(number).save(tmp_path / f"train/{number}.png")
    words = [f"DATA.PATH={tmp_path}", "DATA.TRAIN=[images,fake]", "DATA.KWARGS.num_classes=3"]
    run = train(tmp_path / "run", *words, "DATA.KWARGS.n=12", of=SMALL_TASKS[task], max_steps=2)
    assert "16 images" in (run.run_dir / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SIMMIM.PATCH=5"], "SIMMIM.PATCH 5: squares of 5 x 5 pixels do not fill images of"),
        (["SIMMIM.PATCH=32"], "or there is only one: set SIMMIM.PATCH to a smaller divisor of 32"),
        (
            ["INPUT.IMAGE_SIZE=8"],
            "SIMMIM.PATCH 0: squares of 8 x 8 pixels, the network's stride, do not",
        ),
        (["SIMMIM.RATIO=1.0"], "SIMMIM.RATIO: expected above 0 and below 1, got 1.0"),
        (["INPUT.IMAGE_SIZE=36"], "INPUT.IMAGE_SIZE 36 is not a multiple of the network's stride"),
        (["MODEL.ARCH=resnet18"], "has no grid of features: use msvit, or a model of"),
    ],
)
def test_bad_settings_end_with_one_line(words, message, tmp_path):
    ended = command("train", *MASKED, *words, "--output_dir", tmp_path / "run")
    assert ended.code == 2
    assert message in ended.err
