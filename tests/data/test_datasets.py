"""The datasets: samples, names, and error messages."""

import numpy as np
import pytest
from PIL import Image

from vil.data import build_dataset
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke


def save(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 9), (200, 30, 30)).save(path)


@pytest.fixture
def root(tmp_path):
    """Two classes, of which val has one."""
    for name in ("train/dog/b.PNG", "train/dog/a.jpg", "train/cat/c.webp", "val/dog/d.tif"):
        save(tmp_path / name)
    (tmp_path / "train" / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "dog" / "._a.jpg").write_text("metadata of macOS for a.jpg")
    return tmp_path


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'digits'"):
        build_dataset("digit", "", "train")
    with pytest.raises(ValueError, match="train, val, test"):
        build_dataset("fake", "", "tset")
    with pytest.raises(DataError, match="Digits has no test split, only train and val"):
        build_dataset("digits", "", "test")


def test_digits_split_is_disjoint_complete_and_balanced():
    train, val = (build_dataset("digits", "", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (1437, 360)
    assert sorted([*train.indices, *val.indices]) == list(range(1797))
    share = np.bincount(val.targets) / np.bincount(np.concatenate([train.targets, val.targets]))
    assert np.abs(share - 0.2).max() < 0.01
    # a changed split would silently change every accuracy in the documentation
    assert val.sample_name(0) == "digits/9"
    assert int(val.indices.sum()) == 337431


def test_fake_is_a_function_of_split_and_index():
    one, two = build_dataset("fake", "", "train", n=8), build_dataset("fake", "", "train", n=99)
    assert np.array_equal(one[5][0], two[5][0])
    assert not np.array_equal(one[5][0], build_dataset("fake", "", "val", n=8)[5][0])


def test_folder_sorts_classes_and_files(root):
    train, val = build_dataset("folder", root, "train"), build_dataset("folder", root, "val")
    assert train.classes == val.classes == ["cat", "dog"]
    names = [train.sample_name(i) for i in range(len(train))]
    assert names == ["train/cat/c.webp", "train/dog/a.jpg", "train/dog/b.PNG"]
    assert train.targets.tolist() == [0, 1, 1]
    assert val.targets.tolist() == [1]  # train's number, though val has no cat
    save(root / "train" / "katze ä" / "图 1.png")
    dataset = build_dataset("folder", root, "train")
    assert dataset.sample_name(3) == "train/katze ä/图 1.png"
    assert dataset[3][0].size == (12, 9)


def test_folder_names_empty_classes_and_those_without_training_images(root):
    save(root / "val" / "emu" / "1.jpg")
    save(root / "val" / "yak" / "1.jpg")
    with pytest.raises(DataError, match="emu, yak"):
        build_dataset("folder", root, "val")
    (root / "train" / "emu").mkdir()
    with pytest.raises(DataError, match=str(root / "train" / "emu")):
        build_dataset("folder", root, "train")


def test_folder_evaluates_without_a_train_folder(root, caplog):
    (root / "train").rename(root / "elsewhere")
    assert build_dataset("folder", root, "val").classes == ["dog"]
    assert "classes are taken from the val split" in caplog.text


def test_pixels_are_those_of_the_files(everything):
    cifar = build_dataset("cifar", everything, "val")
    planes = np.random.default_rng(1).integers(0, 256, (12, 3072)).astype(np.uint8)
    assert np.array_equal(np.asarray(cifar[3][0]).transpose(2, 0, 1).ravel(), planes[3])
    mnist = build_dataset("mnist", everything, "train")
    gray = np.random.default_rng(0).integers(0, 256, (12, 28, 28)).astype(np.uint8)
    image = np.asarray(mnist[11][0])
    assert image.shape == (28, 28, 3)
    assert all(np.array_equal(image[:, :, channel], gray[11]) for channel in range(3))
    assert mnist.classes[3] == "3 - three"
    assert mnist.targets[11] == 1


@pytest.mark.parametrize(
    ("name", "folder"),
    [("cifar", "cifar-10-batches-py"), ("cifar100", "cifar-100-python"), ("mnist", "MNIST/raw")],
)
def test_nothing_is_downloaded_by_default(name, folder, tmp_path):
    with pytest.raises(
        DataError, match=f"{tmp_path / folder} is missing .* download=True"
    ) as caught:
        build_dataset(name, tmp_path, "train")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_download_uses_existing_files(everything):
    """As does a second process that waited for the first."""
    for name in ("cifar", "cifar100", "mnist"):
        assert len(build_dataset(name, everything, "train", download=True)) == 12
