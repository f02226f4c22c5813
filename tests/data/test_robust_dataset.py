"""Broken images: detection, substitutes, counting, and the limit that stops a run."""

import logging
import signal

import pytest
import torch
from PIL import Image

from tests.common.bad_images import BAD, GOOD, IMAGE, PNG, encode
from vil.data import build_dataset
from vil.data.image import UnreadableImage, read_image, read_size
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.transforms import eval_transform
from vil.utils.errors import DataError, StoppedError

# PIL warns about images that read_image then rejects.
pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


@pytest.mark.parametrize("name", GOOD)
def test_unusual_images_are_read(name, tmp_path):
    (tmp_path / name).write_bytes(GOOD[name])
    image = read_image(tmp_path / name)
    assert (image.mode, image.size) == ("RGB", (56, 40))


@pytest.mark.parametrize("name", BAD)
def test_broken_images_raise_one_error(name, tmp_path):
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(UnreadableImage, match=r"\w+: \w+"):
        read_image(tmp_path / name)
    if "bomb" in name:
        with pytest.raises(UnreadableImage, match="DecompressionBomb"):
            read_size(tmp_path / name)
    with pytest.raises(UnreadableImage, match="FileNotFoundError"):
        read_image(tmp_path / "gone.jpg")


def folder(root, good, bad):
    """train and val with `good` valid images and the first `bad` broken ones."""
    files = {f"{i:03d}.png": PNG for i in range(good)}
    files |= dict(list(BAD.items())[:bad])
    for split in ("train", "val"):
        (root / split / "one").mkdir(parents=True)
        for name, content in files.items():
            (root / split / "one" / name).write_bytes(content)
    return root


def train(root, workers=0, steps=40, **options):
    dataset = build_dataset("folder", root, "train", eval_transform(8))
    loader = TrainLoader(dataset, batch_size=10, workers=workers, **options)
    return loader, list(loader.batches(0, steps))


@pytest.fixture
def five_percent(tmp_path):
    return folder(tmp_path, good=171, bad=9)


@pytest.mark.defect("B22")
def test_training_substitutes_counts_once_and_lists(five_percent, tmp_path, caplog):
    """Two epochs of 180 images, 9 of them broken: 9 warnings, 9 lines, full batches."""
    listed = tmp_path / "bad_samples.txt"
    with caplog.at_level(logging.WARNING):
        loader, batches = train(five_percent, max_bad_fraction=0.05, bad_file=listed)
    assert all(len(batch) == 10 for batch in batches)
    assert len(loader.bad_samples.seen) == len(BAD)
    assert len(caplog.records) == len(BAD)
    lines = [line.split("\t") for line in listed.read_text().splitlines()]
    assert sorted(name for name, _ in lines) == sorted(f"train/one/{name}" for name in BAD)
    assert all(reason for _, reason in lines)
    assert not loader.bad_samples.seen & set(torch.cat([b.indices for b in batches]).tolist())
    # a resumed run, with workers, has the same substitutes and lists no image again
    _, shared = train(five_percent, workers=2, max_bad_fraction=0.05, bad_file=listed)
    assert len(listed.read_text().splitlines()) == len(BAD)
    for one, other in zip(batches, shared):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.images, other.images)
        assert one.bad_samples == other.bad_samples


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_stop_the_training(five_percent, workers):
    with pytest.raises(DataError, match=r"9 of 180 images cannot be read.*0.045"):
        train(five_percent, workers=workers, max_bad_fraction=0.045)


def test_nine_broken_in_a_row_are_tolerated_ten_are_not(five_percent):
    """The broken files are consecutive, so that the first needs the ninth substitute."""
    train(five_percent, max_bad_fraction=1.0)
    (five_percent / "train" / "one" / "170.png").write_bytes(b"")
    with pytest.raises(DataError, match="10 images in a row"):
        train(five_percent, max_bad_fraction=1.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_leaves_them_out_and_counts_them_once(five_percent, workers, caplog):
    dataset = build_dataset("folder", five_percent, "val", eval_transform(8))
    loader = EvalLoader(dataset, batch_size=4, workers=workers, max_bad_fraction=0.05)
    with caplog.at_level(logging.WARNING):
        passes = [[batch.indices.tolist() for batch in loader] for _ in range(2)]
    assert passes[0] == passes[1]
    assert sum(passes[0], []) == list(range(171))
    assert all(passes[0])  # 180 samples are 45 batches, of which the last two are empty
    assert len(caplog.records) == len(loader.bad_samples.seen) == len(BAD)
    assert (loader.num_samples, len(loader)) == (180, 45)


def explode(image):
    raise ValueError("a bug in a transform")


def test_other_errors_are_not_caught(tmp_path):
    dataset = build_dataset("folder", folder(tmp_path, good=20, bad=0), "train", explode)
    with pytest.raises(ValueError, match="a bug in a transform"):
        list(TrainLoader(dataset, batch_size=10, max_bad_fraction=1.0).batches(0, 1))


def test_a_signal_that_comes_while_an_image_is_read_is_no_broken_image(tmp_path, monkeypatch):
    """Without workers the main process decodes; its handler raises wherever it is."""

    def stopped(*args, **kwargs):
        raise StoppedError(signal.SIGTERM)

    file = tmp_path / "a.png"
    file.write_bytes(encode(IMAGE, "JPEG"))
    for owner, name in ((Image.Image, "getexif"), (Image.Image, "load"), (Image, "open")):
        monkeypatch.setattr(owner, name, stopped)
        with pytest.raises(StoppedError):
            read_image(file)
