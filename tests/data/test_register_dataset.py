"""A user's own dataset: registered, built by its name, checked at registration and when built."""

import numpy as np
import pytest
from PIL import Image

from tests.common.built import task_of
from vil.config import get_config
from vil.data import (
    DATASETS,
    ImageDataset,
    is_numbered,
    own_arguments,
    register_dataset,
)
from vil.engine.distributed import DistInfo


@pytest.fixture(autouse=True)
def unregister():
    yield
    for name in [name for name in DATASETS if name.startswith("mine")]:
        DATASETS.remove(name)


class Greys(ImageDataset):
    """Uniform images whose gray level is their class."""

    def __init__(self, root, split, transform=None, *, n=24, num_classes=4):
        super().__init__(split, transform)
        self.targets = np.arange(n) % num_classes
        self.classes = [f"gray {number}" for number in range(num_classes)]

    def image(self, index):
        return Image.new("RGB", (40, 40), (int(self.targets[index]) * 20,) * 3)

    def sample_name(self, index):
        return f"grays/{self.split}/{index}"


def test_a_registered_dataset_is_trained_and_evaluated_by_its_name():
    register_dataset("mine", Greys, about="uniform images", numbered=True)
    assert is_numbered("mine")
    assert own_arguments("mine") == ["n", "num_classes"]
    cfg = get_config(
        opts=["DATA.TRAIN", "['mine']", "DATA.TEST", "['mine']", "DATA.NUM_CLASSES", "6"]
        + ["DATA.KWARGS.n", "30", "DATALOADER.BSZ", "10", "DATALOADER.WORKERS", "0"]
        + ["INPUT.IMAGE_SIZE", "32"]
    )
    loader = task_of(cfg).train_loader(DistInfo())
    assert (loader.steps_per_epoch, len(loader.classes)) == (3, 6)
    assert next(loader.batches(0, 1)).to("cpu").images.shape == (10, 3, 32, 32)
    (test,) = task_of(cfg).test_loaders(DistInfo()).values()
    assert sum(len(batch) for batch in test) == 30


class Half(ImageDataset):
    def __init__(self, root, split, transform):
        super().__init__(split, transform)

    def image(self, index):
        """An image without a name."""


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (5, "must be a class or a function, got 5"),
        (lambda root, split: None, r"exactly three positional.*signature is \(root, split\)"),
        (lambda root, split, transform, size: None, "keyword-only"),
        (lambda root, split, transform, **own: None, "keyword-only"),
        (type("Rows", (), {"__init__": Greys.__init__}), "Rows must subclass vil.data.ImageDat"),
        (Half, "Half must define sample_name"),
    ],
)
def test_a_dataset_that_breaks_the_contract_is_refused(dataset, message):
    with pytest.raises(ValueError, match=message):
        register_dataset("mine", dataset)
    assert "mine" not in DATASETS
