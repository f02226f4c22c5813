"""Images that are normalized and erased on the device equal those of one transform per image."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import v2

from vil.data.batch import collate
from vil.data.pixels import PixelBatch, loader_transform
from vil.data.transforms import eval_transform, train_transform

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ERASE = dict(re_prob=0.8, re_count=3)
TIMM = dict(color_jitter=None, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bilinear")
CASES = {  # {name: (our transform, the library's)}
    "evaluation": (
        eval_transform(32, mean=MEAN, std=STD),
        [v2.Resize(36), v2.CenterCrop(32), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
        + [v2.Normalize(MEAN, STD)],
    ),
    **{
        f"erased by {mode}": (
            train_transform(
                32, use_timm=True, mean=MEAN, std=STD, re_mode=mode,
                auto_augment=TIMM["auto_augment"], **ERASE,
            ),
            [create_transform(32, True, mean=MEAN, std=STD, re_mode=mode, **TIMM, **ERASE)],
        )
        for mode in ("pixel", "rand", "const")
    },
}  # fmt: skip


def draw_images(count: int) -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), np.uint8)) for _ in range(count)
    ]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_equals_the_transform_of_each_image(name):
    ours, theirs = CASES[name]
    samples, wanted, floats = [], [], []
    for number, image in enumerate(draw_images(12)):
        seed(number)
        samples.append((loader_transform(ours)(image), number, number))
        seed(number)
        wanted.append(v2.Compose(theirs)(image))
        seed(number)
        floats.append(ours(image))
    batch = collate(samples, ())
    assert isinstance(batch.images, PixelBatch)
    assert batch.images.images.dtype == torch.uint8
    images = batch.to("cpu", torch.channels_last).images
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, torch.stack(wanted))
    assert torch.equal(torch.stack(floats), torch.stack(wanted))
    erased = {int(index) for index in batch.images.places[:, 0]}
    assert (len(erased) > 5) == ("erased" in name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_computes_the_same_numbers(name):
    samples = [(loader_transform(CASES[name][0])(image), 0, 0) for image in draw_images(12)]
    batch = collate(samples, ())
    on_gpu = batch.pin_memory().to("cuda").images
    assert torch.equal(on_gpu.cpu(), batch.to("cpu").images)
