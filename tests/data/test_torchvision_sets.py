"""CIFAR and MNIST: pixels of the files, and no download unless requested."""

import multiprocessing

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, MNIST

from vil.data import build_dataset
from vil.data.datasets.torchvision_sets import download_lock
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


def test_a_failed_download_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/no.tar.gz")
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])
    for name in ("cifar", "mnist"):
        with pytest.raises(DataError, match=f"{tmp_path}.* is missing or incomplete") as caught:
            build_dataset(name, tmp_path, "train", download=True)
        assert "\n" not in str(caught.value)


def visit(root, queue):
    with download_lock(root):
        queue.put("in")
        list(range(100_000))
        queue.put("out")


def test_processes_download_one_after_the_other(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [context.Process(target=visit, args=(tmp_path / "new", queue)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [queue.get() for _ in range(6)] == ["in", "out"] * 3
