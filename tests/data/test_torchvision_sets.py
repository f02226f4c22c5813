"""CIFAR and MNIST: pixels of the files, and no download unless requested."""

import numpy as np
import pytest

from vil.data import build_dataset
from vil.utils.errors import DataError


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
