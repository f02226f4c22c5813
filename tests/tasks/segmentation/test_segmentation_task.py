"""The segmentation task: windows, evaluation, class weights, outputs."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.common.small_runs import checkpoint, results, succeeds, vil
from tests.common.small_tasks import words_of
from vil.config import get_config
from vil.export import load_exported
from vil.tasks import task_for
from vil.tasks.segmentation.windows import blend_windows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segmentation") / "run"
    words = ["DATA.KWARGS.n=7", "DATALOADER.BSZ=4", "OPTIM.EPOCHS=1"]
    succeeds("train", *words_of("segmentation", folder), *words, "--output_dir", folder)
    return folder


@pytest.mark.parametrize("size", [(5, 7), (33, 64), (100, 41)], ids=str)
@pytest.mark.parametrize(("tile", "overlap"), [(16, 0), (16, 15), (32, 8), (200, 50)])
def test_windows_of_a_pointwise_model_give_the_whole_image(size, tile, overlap):
    image = torch.randn(3, *size, dtype=torch.float64)
    found = blend_windows(lambda x: 2 * x[:2] + 1, image, tile=tile, overlap=overlap)
    torch.testing.assert_close(found, (2 * image[:2] + 1).float(), rtol=1e-5, atol=1e-4)


def test_a_window_counts_less_towards_its_border():
    """Each of two windows has a constant: the result rises evenly from one to the other."""
    values = iter([0.0, 1.0])
    image = torch.zeros(1, 4, 14)
    found = blend_windows(lambda x: torch.full_like(x, next(values)), image, tile=10, overlap=6)
    row = found[0, 2]
    assert row[:4].eq(0).all()
    assert row[10:].eq(1).all()
    assert (row[4:10].diff() - row[4:10].diff()[0]).abs().max() < 1e-6


def test_evaluation_writes_the_predicted_classes(run, tmp_path):
    words = ["evaluate", "--run", run, "--output_dir", tmp_path / "out", "--pictures", "2"]
    succeeds(*words, "OUTPUT_PERCLASS_ACC=True")
    maps = sorted((tmp_path / "out/eval/fake_masks").rglob("*.png"))
    assert len(maps) == 7
    assert np.asarray(Image.open(maps[0])).max() < 3
    assert len(list((tmp_path / "out/eval/pictures").rglob("*.png"))) == 2


def test_windows_and_sizes_in_evaluation(run, tmp_path):
    """A window larger than the image is the image. Labels keep their size."""
    whole, window, resized = (
        results_of(run, tmp_path / str(number), *words)
        for number, words in enumerate(
            [[], ["SEGMENTATION.TEST.TILE=64"], ["SEGMENTATION.TEST.SIZE=17"]]
        )
    )
    assert window == whole
    assert resized["count"] == whole["count"]
    assert resized["miou"] != whole["miou"]


def results_of(run, folder, *words):
    succeeds("evaluate", "--run", run, "--output_dir", folder, *words)
    return results(folder)["fake_masks"]


def test_the_run_records_the_colors_of_the_classes(run):
    palette = get_config(run / "config.yaml").SEGMENTATION.PALETTE
    assert len(palette) == 9


def test_predictions_are_drawn_and_written(run, tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 51, 3), np.uint8))
    image.save(tmp_path / "a.png")
    outputs = "SEGMENTATION.TEST.OUTPUTS=[overlay,classes,probabilities]"
    words = ["predict", "--run", run, tmp_path / "a.png", "--output", tmp_path / "out", outputs]
    rows = json.loads(succeeds(*words, "--format", "json"))
    classes = np.asarray(Image.open(tmp_path / "out/a-classes.png"))
    probabilities = np.load(tmp_path / "out/a-probabilities.npy")
    assert classes.shape == (37, 51)
    assert (probabilities.argmax(0) == classes).mean() > 0.95  # equal after rounding
    counts = np.bincount(classes.ravel(), minlength=3)
    assert {row["index"]: row["pixels"] for row in rows[0]["classes"]} == {
        number: count for number, count in enumerate(counts.tolist()) if count
    }


@pytest.mark.long
def test_a_file_takes_one_image_or_batches_of_one_size(run, tmp_path):
    words = ["export", "--run", run, "--out", tmp_path / "a.onnx", "--dynamic"]
    for own in (["batch,size"], ["batch", "--size", "61x64"]):
        ended = vil(*words, *own)
        assert ended.code == 2, ended.err
        assert "one image of any size or batches of one fixed size" in ended.err.splitlines()[-1]
    assert "shape 3 x 3 x 64 x 32" in succeeds(*words, "batch", "--size", "64x32")


def test_the_metadata_of_a_file_are_those_of_segmentation(run, tmp_path):
    file = tmp_path / "a.pt2"
    words = ["--size", "32x32", "--dynamic", "batch", "SEGMENTATION.TEST.SIZE=40"]
    succeeds("export", "--run", run, "--out", file, *words)
    metadata = load_exported(file).metadata
    assert (metadata["activation"], metadata["test_size"]) == ("softmax", "40")
    assert {"mean", "std", "classes"} <= set(metadata)
    assert not {"crop_pct", "interpolation"} & set(metadata)


def test_balanced_weights_are_those_of_the_counted_pixels(tmp_path):
    words = [*words_of("segmentation", tmp_path / "run"), "LOSS.CLASS_WEIGHTS=balanced"]
    task = task_for(get_config(opts=words), torch.device("cpu"))
    from vil.engine.distributed import DistInfo

    dataset = task.train_loader(DistInfo()).samples.dataset
    masks = np.stack([dataset.mask(index) for index in range(len(dataset))])
    counts = np.array([(masks == number).sum() for number in range(3)])
    logits, target = torch.randn(1, 3, 8, 8), torch.randint(0, 3, (1, 8, 8))
    weights = torch.tensor(counts.sum() / (3 * counts)).float()
    expected = F.cross_entropy(logits, target, weights)
    torch.testing.assert_close(task.loss_function(logits, target)[0], expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SEGMENTATION.MODEL="], "needs a head"),
        (["INPUT.CHANNELS=1", "INPUT.MEAN=[0.5]", "INPUT.STD=[0.5]"], "RGB images only"),
        (["MODEL.ARCH=resnet18"], "model of timm"),
        (["SEGMENTATION.LOSS=ce + dise"], "dice"),
        (["SEGMENTATION.TEST.OVERLAP=4"], "needs windows"),
        (["LOSS.CLASS_WEIGHTS=[1,2]"], "2 numbers"),
        (["DATA.TRAIN=[fake_masks,scenes]"], "one set only"),
        (["DATA.NUM_CLASSES=5"], "3 classes"),
        (["SEGMENTATION.MODEL=smp/Unett"], "Unet"),
        (["EVAL.METRIC=top1"], "miou"),
        (["SEGMENTATION.PALETTE=[1,2,3,4]"], "three numbers from 0 to 255"),
        (["SEGMENTATION.PALETTE=[1,2,300]"], "three numbers from 0 to 255"),
        (["SEGMENTATION.PALETTE=[1,2,3]"], "needs 9"),
        (["AUG.TIMM_AUG.USE_TRANSFORM=True", "AUG.TIMM_AUG.AUTO_AUGMENT=rand-m9"], "3a"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_settings(tmp_path, words, message):
    ended = vil("train", *words_of("segmentation", tmp_path / "run"), "TASK=segmentation", *words,
                "--output_dir", tmp_path / "run")  # fmt: skip
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert len(ended.err.splitlines()) <= 3


def test_a_palette_of_the_user_stays(tmp_path):
    palette = "SEGMENTATION.PALETTE=[1,2,3,4,5,6,7,8,9]"
    words = [*words_of("segmentation", tmp_path / "run"), palette, "OPTIM.EPOCHS=1"]
    succeeds("train", *words, "--output_dir", tmp_path / "run")
    assert [*range(1, 10)] == get_config(tmp_path / "run/config.yaml").SEGMENTATION.PALETTE


def test_another_head_starts_from_the_body(run, tmp_path):
    words = [*words_of("segmentation", tmp_path / "run"), "SEGMENTATION.MODEL=fpn"]
    weights = f"MODEL.MODEL_PATH={checkpoint(run)}"
    assert vil("train", *words, weights, "--output_dir", tmp_path / "a").code != 0
    succeeds("train", *words, weights, "FINETUNE.HEAD=new", "--output_dir", tmp_path / "b")
