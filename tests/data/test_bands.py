"""Images of other channels than RGB: reading, transforms, synthetic images."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image

from tests.common.bad_images import BAD, encode
from vil.data.bands import BandImage
from vil.data.datasets.fake import Fake
from vil.data.image import UnreadableImage, read_image
from vil.data.transforms import eval_transform, train_transform

PIXELS = np.random.default_rng(0).integers(0, 256, (13, 17, 5), np.uint8)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return io.BytesIO(buffer.getvalue())


def tiff(array):
    pages = [Image.fromarray(array[..., n]) for n in range(array.shape[-1])]
    buffer = io.BytesIO()
    pages[0].save(buffer, "TIFF", save_all=True, append_images=pages[1:])
    return io.BytesIO(buffer.getvalue())


@pytest.mark.parametrize("write", [npy, tiff])
@pytest.mark.parametrize("channels", [2, 4, 5])
def test_bands_are_read_without_loss(write, channels):
    image = read_image(write(PIXELS[..., :channels]), channels=channels)
    assert isinstance(image, BandImage)
    assert (image.width, image.height) == (17, 13)
    assert image.dtype == torch.uint8
    assert np.array_equal(image.numpy().transpose(1, 2, 0), PIXELS[..., :channels])


@pytest.mark.parametrize(("mode", "format"), [("LA", "PNG"), ("RGBA", "PNG"), ("CMYK", "TIFF")])
def test_pil_modes_are_bands(mode, format):
    pixels = PIXELS[..., : len(mode)]
    source = encode(Image.fromarray(pixels, mode), format)
    image = read_image(io.BytesIO(source), channels=len(mode))
    assert np.array_equal(image.numpy().transpose(1, 2, 0), pixels)


@pytest.mark.parametrize("write", [npy, tiff])
def test_16_bits_keep_their_precision(write):
    values = PIXELS[..., :4].astype(np.uint16) * 200 + 3
    image = read_image(write(values), channels=4)
    assert image.dtype == torch.float32
    assert np.allclose(image.numpy().transpose(1, 2, 0), values / 65535)
    stretched = read_image(write(values), (1000, 3000), channels=4)
    expected = ((values - 1000.0) / 2000).clip(0, 1)
    assert np.allclose(stretched.numpy().transpose(1, 2, 0), expected)


def test_floats_have_a_range():
    values = PIXELS[..., :2].astype(np.float32) / 255
    values[0, 0, 0] = np.nan
    image = read_image(npy(values), channels=2)
    assert image[0, 0, 0] == 0
    assert np.allclose(image.numpy()[1], values[..., 1])
    with pytest.raises(UnreadableImage, match="DATA.VALUE_RANGE"):
        read_image(npy(values * 300), channels=2)
    assert read_image(npy(values * 300), (0, 300), channels=2).max() <= 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (npy(PIXELS), r"5 channels .* INPUT.CHANNELS is 4"),
        (tiff(PIXELS), "5 channels"),
        (io.BytesIO(encode(Image.new("RGB", (4, 4)), "PNG")), r"3 channels \(mode RGB\)"),
        (npy(np.zeros((2, 2, 4), np.int32)), "32-bit integers have no .* set DATA.VALUE_RANGE"),
        (npy(np.zeros((2, 2, 4), np.int16)), "signed 16-bit integers have no default"),
        (npy(np.zeros((2, 2, 4), complex)), "complex"),
        (npy(np.zeros((0, 2, 4), np.uint8)), r"must be a nonempty array \(H, W\) or \(H, W, C\)"),
        (npy(np.zeros((2, 2, 2, 4), np.uint8)), r"not one of shape \(2, 2, 2, 4\)"),
        (npy(np.full((2, 2, 4), np.nan)), "no pixel has a finite value"),
        (io.BytesIO(b"\x93NUMPY\x01\x00"), "ValueError|EOFError"),
        (npy(np.array([{"a": 1}], object)), "allow_pickle"),
        *((io.BytesIO(content), ".") for content in BAD.values()),
    ],
)
def test_files_that_do_not_fit_are_unreadable(source, message):
    source.seek(0)
    with pytest.raises(UnreadableImage, match=message):
        read_image(source, channels=4)


MAKERS = {
    "eval": lambda **own: eval_transform(24, **own),
    "torchvision": lambda **own: train_transform(
        24, vflip=0.5, color_jitter=(0, 0, 0, 0, 0), **own
    ),
    "finetune": lambda **own: train_transform(24, finetune=True, **own),
}


@pytest.mark.parametrize("name", MAKERS)
def test_bands_get_the_geometry_of_rgb(name):
    """On a smooth image, as PIL and torch round differently."""
    ramp = np.add.outer(np.arange(48), np.arange(64)).astype(np.uint8) * 2
    rgb = np.stack([ramp, 255 - ramp, ramp // 2], -1)
    bands = read_image(npy(np.concatenate([rgb, rgb[..., :1]], -1)), channels=4)
    own = dict(mean=[0.5], std=[0.25])
    for seed in range(4):
        torch.manual_seed(seed)
        expected = MAKERS[name](**own)(Image.fromarray(rgb))
        torch.manual_seed(seed)
        found = MAKERS[name](channels=4, **own)(bands)
        assert type(found) is torch.Tensor
        assert (found.shape, found.dtype) == ((4, 24, 24), torch.float32)
        assert (found[:3] - expected).abs().max() < 0.05
        assert torch.equal(found[3], found[0])


@pytest.mark.parametrize("use_timm", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 7])
def test_every_training_transform_takes_any_channels(use_timm, channels):
    image = Fake(None, "train", size=40, channels=channels).image(3)
    transform = train_transform(
        24, use_timm=use_timm, channels=channels, mean=[0.5], std=[0.25] * channels,
        auto_augment="rand-m9-mstd0.5-inc1", re_prob=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    random.seed(0)
    found = transform(image)
    assert (found.shape, found.dtype) == ((channels, 24, 24), torch.float32)
    assert found.isfinite().all()


def test_gray_is_the_luma_of_rgb():
    image = Image.fromarray(PIXELS[..., :3])
    found = eval_transform(13, crop_pct=1.0, channels=1, mean=[0], std=[1])(image)
    expected = np.asarray(image.convert("L"))[:, 2:15] / 255
    assert np.allclose(found[0], expected, atol=1e-6)
    gray = Image.fromarray(PIXELS[..., 0])
    kept = eval_transform(13, crop_pct=1.0, channels=1, mean=[0], std=[1])(gray.convert("RGB"))
    assert np.allclose(kept[0], PIXELS[:, 2:15, 0] / 255, atol=1e-6)
