"""A user's own augmentation: registered, applied at its place, exact for any number of workers and
after resuming, and refused if it cannot be."""

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

from tests.common.built import task_of
from tests.common.doc_pages import blocks
from tests.common.marks import cases
from tests.common.small_runs import TINY, vil
from tests.common.small_tasks import SMALL_TASKS
from vil.config import get_config
from vil.data import TRANSFORMS, register_transform
from vil.engine.distributed import DistInfo
from vil.utils.errors import ConfigError

OWN = "AUG.TRANSFORM=own"
TIMM = "AUG.TIMM_AUG.USE_TRANSFORM=True"
GRAY = ["INPUT.CHANNELS=1", "INPUT.MEAN=[0.5]", "INPUT.STD=[0.25]"]


@pytest.fixture(autouse=True)
def unregister():
    yield
    for name in [*TRANSFORMS]:
        TRANSFORMS.remove(name)


def batches(start, stop, *settings, task=TINY):
    """The training images (steps, B, c, S, S) of these steps, normalized."""
    cfg = get_config(opts=[*task, OWN, *settings])
    loader = task_of(cfg).train_loader(DistInfo())
    return torch.stack([batch.to("cpu").images for batch in loader.batches(start, stop)])


def shifted(image):
    """Draws from all three generators."""
    moves = random.randrange(256), int(np.random.randint(256)), int(torch.randint(256, ()))
    return Image.fromarray(np.array(image) + np.array(moves, np.uint8))


@pytest.mark.parametrize("settings", cases([[], [TIMM], GRAY], long=[[TIMM], GRAY]), ids=str)
def test_images_depend_on_neither_workers_nor_resuming(settings):
    register_transform("own", lambda: shifted)
    first = batches(0, 6, "DATALOADER.WORKERS=0", *settings)
    for workers in (1, 2):
        assert batches(0, 6, f"DATALOADER.WORKERS={workers}", *settings).equal(first)
        assert batches(3, 6, f"DATALOADER.WORKERS={workers}", *settings).equal(first[3:])
    assert not first[:3].equal(first[3:])  # another epoch draws again
    TRANSFORMS.remove("own")
    register_transform("own", lambda: lambda image: image)
    assert not batches(0, 6, "DATALOADER.WORKERS=0", *settings).equal(first)


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("timm", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_it_comes_last_and_sees_the_crop_in_rgb(task, channels, timm, finetune):
    seen = []

    def paint(image):
        seen.append((image.mode, image.size))
        return Image.new("RGB", image.size, (51, 102, 204))

    register_transform("own", lambda: paint)
    settings = [
        f"FINETUNE.FINETUNE={finetune}",
        f"INPUT.CHANNELS={channels}",
        "INPUT.IMAGE_SIZE=40",
    ]
    settings += [f"AUG.TIMM_AUG.USE_TRANSFORM={timm}", "AUG.TIMM_AUG.RE_PROB=0"]
    settings += [
        "DATALOADER.WORKERS=0",
        "INPUT.MEAN=[0]" if channels == 1 else "INPUT.MEAN=[0,0,0]",
    ]
    settings += ["INPUT.STD=[1]" if channels == 1 else "INPUT.STD=[1,1,1]"]
    images = batches(0, 1, *settings, task=[*TINY, *SMALL_TASKS.get(task, [])])
    assert set(seen) == {("RGB", (40, 40))}
    expected = torch.tensor([0.2, 0.4, 0.8])[:, None, None] if channels == 3 else 98 / 255
    assert torch.allclose(images, torch.as_tensor(expected).expand_as(images), atol=1e-6)


@pytest.mark.parametrize("transform", [v2.AugMix(), v2.RandomSolarize(128), v2.ElasticTransform()])
def test_transforms_of_torchvision(transform):
    register_transform("own", lambda: transform)
    first = batches(0, 4, "DATALOADER.WORKERS=0")
    assert batches(2, 4, "DATALOADER.WORKERS=2").equal(first[2:])


def test_arguments_are_config_keys_and_a_location_is_imported_at_first_use():
    keys = {"bits": "LOG_FREQ", "p": "AUG.GRAY_SCALE"}
    register_transform("own", "torchvision.transforms.v2:RandomPosterize", keys=keys)
    images = batches(0, 1, "LOG_FREQ=1", "AUG.GRAY_SCALE=1", "DATALOADER.WORKERS=0")
    assert len(images.unique()) <= 6  # two values per channel


class Compose:
    """Stands in for albumentations: with generators of its own and a dict as result."""

    def __init__(self):
        self.generator = np.random.default_rng()

    def set_random_seed(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self, *, image):
        return {"image": image + self.generator.integers(256, size=3, dtype=np.uint8)}


def test_the_documented_wrapper_of_albumentations():
    (code,) = [b.code for b in blocks("docs/guides/plugins.md") if "class Albumentations" in b.code]
    exec(code, names := {})
    register_transform("own", lambda: names["Albumentations"](Compose()))
    first = batches(0, 4, "DATALOADER.WORKERS=0")
    assert batches(2, 4, "DATALOADER.WORKERS=2").equal(first[2:])


class Counting:
    calls = 0

    def __call__(self, image):
        self.calls += 1
        return ImageOps.posterize(image, 1 + self.calls % 8)


def unseeded(image):
    return Image.fromarray(Compose()(image=np.array(image))["image"])


WRONG = {
    "array": (lambda image: np.array(image), "own must return a PIL image .*, got .* type ndarray"),
    "tensor": (v2.PILToTensor(), "got an object of type Tensor"),
    "dict": (lambda image: Compose()(image=np.array(image)), "got an object of type dict"),
    "nothing": (lambda image: None, "got an object of type NoneType"),
    "size": (v2.Resize(20), "of mode RGB and size 32x32, got .* mode RGB and size 20x20"),
    "mode": (ImageOps.grayscale, "got a PIL image of mode L and size 32x32"),
    "tensors only": (v2.GaussianNoise(), "not implemented for PIL images"),
    "own error": (lambda image: 1 / 0, "ZeroDivisionError: division by zero"),
    "not a function": (3, "TypeError: 'int' object is not callable"),
    "own generator": (unseeded, "two calls with the same seed give different images"),
    "state": (Counting(), "two calls with the same seed give different images"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_one_that_breaks_the_contract_is_refused_at_the_start(case):
    transform, message = WRONG[case]
    register_transform("own", lambda: transform)
    with pytest.raises(ConfigError, match=f"^AUG.TRANSFORM own: .*({message})") as caught:
        batches(0, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_result_that_is_wrong_later_ends_the_run(workers, tmp_path):
    """The trial cannot show what depends on the pixels."""
    register_transform(
        "own", lambda: lambda image: image if is_noise(image) else image.convert("L")
    )
    words = [*TINY, OWN, f"DATALOADER.WORKERS={workers}"]
    ended = vil("train", "--output_dir", tmp_path / "run", *words)
    assert (ended.code, ended.err.count("\n")) == (1, 1), ended.err
    assert "ValueError: the transform own must return a PIL image of mode RGB" in ended.err


def is_noise(image):
    return np.array(image).std() > 60


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (v2.RandomSolarize(128), "a function or class that returns the transform, such as lambda"),
        (3, "got 3"),
        (lambda image: image, r"can be called as build\(\): missing a required argument: 'image'"),
        (v2.RandomSolarize, "missing a required argument: 'threshold'"),
    ],
)
def test_what_cannot_build_a_transform_is_refused_at_registration(build, message):
    with pytest.raises(ValueError, match=f"transform 'own' must be .*{message}"):
        register_transform("own", build)
    assert "own" not in TRANSFORMS


def test_unknown_names_and_other_channels_are_errors_of_the_config():
    with pytest.raises(ConfigError, match="AUG.TRANSFORM: .* --import registers, got 'own'"):
        batches(0, 1)
    register_transform("owl", lambda: shifted)
    with pytest.raises(ConfigError, match="AUG.TRANSFORM: .*; did you mean owl?"):
        batches(0, 1)
    register_transform("own", lambda: shifted)
    with pytest.raises(ConfigError, match="AUG.TRANSFORM own is for RGB images, but INPUT.CHANNE"):
        batches(0, 1, "INPUT.CHANNELS=4", "INPUT.MEAN=[0]", "INPUT.STD=[1]")
