"""Transforms: shapes, statistics and randomness."""

import numpy as np
import pytest
import torch
from PIL import Image

from vil.config import get_config
from vil.data.bands import make_bands
from vil.data.image import UnreadableImage
from vil.data.samplers import fork_rng
from vil.data.transforms import eval_transform, train_transform
from vil.tasks.image.build import build_train_transform, transform_settings
from vil.utils.errors import ConfigError

pytestmark = pytest.mark.smoke

DIGITS = {"use_timm": True, "scale": (0.7, 1.0), "hflip": 0.0}
CHAINS = {
    "plain": {"color_jitter": (0.4, 0.4, 0.4, 0.1, 0.8), "gray_scale": 0.2, "gaussian_blur": 0.5},
    "bicubic": {"interpolation": "bicubic", "vflip": 0.5},
    "finetune": {"finetune": True, "crop_pct": 0.75},
    "timm": {"use_timm": True, "auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25},
    "timm jitter": {"use_timm": True, "color_jitter": 0.4, "interpolation": "bicubic"},
    "digits": {**DIGITS, "auto_augment": "rand-m5-n1-mstd0.5"},
}


NARROW = ((1, 65_000), (65_000, 1))


def noise(width, height):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def augment(image, transform, position):
    with fork_rng("augment", 0, 0, position):
        return transform(image)


@pytest.mark.parametrize("chain", CHAINS)
def test_any_image_becomes_a_normalized_square_that_varies_with_the_position(chain):
    transform = train_transform(48, **CHAINS[chain])
    for size in ((64, 64), (33, 90), (200, 21), (1, 1)):
        first, again = (augment(noise(*size), transform, 3) for _ in range(2))
        assert type(first) is torch.Tensor
        assert (first.dtype, first.shape) == (torch.float32, (3, 48, 48))
        assert torch.equal(first, again)
        assert first.isfinite().all()
    sums = [augment(noise(64, 64), transform, i).double().abs().sum().item() for i in range(8)]
    assert len({round(value, 3) for value in sums}) >= 6


def test_eval_resizes_the_shorter_side_and_takes_the_center():
    """224 of 256: an image of 512 x 256 is not resized, only cropped."""
    pixels = np.zeros((256, 512, 3), np.uint8)
    pixels[16:240, 144:368] = 255  # exactly the center
    image = eval_transform(224, mean=(0, 0, 0), std=(1, 1, 1))(Image.fromarray(pixels))
    assert image.shape == (3, 224, 224)
    assert (image == 1).all()


@pytest.mark.parametrize("size", [(40, 40), (33, 90), (7, 5)], ids=str)
def test_eval_is_deterministic_and_normalized(size):
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.5, 2.0)
    transform = eval_transform(24, mean=mean, std=std, interpolation="bicubic", crop_pct=1.0)
    gray = transform(Image.new("RGB", size, (51, 102, 204)))
    expected = [(0.2 - 0.1) / 0.2, (0.4 - 0.5) / 0.5, (0.8 - 0.9) / 2.0]
    assert torch.allclose(gray, torch.tensor(expected)[:, None, None].expand(3, 24, 24), atol=1e-6)
    assert torch.equal(transform(noise(*size)), transform(noise(*size)))


@pytest.mark.parametrize("use_timm", [False, True])
def test_flips_and_scale(use_timm):
    """With the full image as crop, a flip of probability 1 or 0 is exact."""
    options = {"use_timm": use_timm, "scale": (1.0, 1.0), "ratio": (1.0, 1.0), "color_jitter": 0.0}
    image = noise(16, 16)
    kept = train_transform(16, hflip=0.0, **options)(image)
    assert torch.allclose(train_transform(16, hflip=1.0, **options)(image), kept.flip(2))
    both = train_transform(16, hflip=1.0, vflip=1.0, **options)(image)
    assert torch.allclose(both, kept.flip(1, 2))


@pytest.mark.parametrize("use_timm", [False, True])
def test_one_key_is_the_probability_of_flips_in_both_transforms(use_timm):
    words = ["AUG.SCALE=[1, 1]", "AUG.RATIO=[1, 1]", "INPUT.IMAGE_SIZE=16"]
    words += ["AUG.COLOR_JITTER=[0, 0, 0, 0, 0]", "AUG.TIMM_AUG.COLOR_JITTER=0"]
    words += [f"AUG.TIMM_AUG.{key}" for key in ("RE_PROB=0", "AUTO_AUGMENT=", "VFLIP=1")]
    words.append(f"AUG.TIMM_AUG.USE_TRANSFORM={use_timm}")

    def transformed(hflip):
        cfg = get_config(None, [*words, f"AUG.TIMM_AUG.HFLIP={hflip}"])
        return build_train_transform(cfg, transform_settings(cfg))(noise(16, 16))

    kept = eval_transform(16, crop_pct=1.0)(noise(16, 16)).flip(1)
    torch.testing.assert_close(transformed(0), kept)
    torch.testing.assert_close(transformed(1), kept.flip(2))


@pytest.mark.parametrize("policy", ["rand-m9-foo5", "rand-9", "augmix-x1", "v0-m9", "augmix-w2.5"])
def test_a_policy_that_timm_refuses_is_named(policy):
    words = ["AUG.TIMM_AUG.USE_TRANSFORM=True", f"AUG.TIMM_AUG.AUTO_AUGMENT={policy}"]
    cfg = get_config(None, words)
    with pytest.raises(ConfigError, match=f"auto_augment '{policy}'.: "):
        build_train_transform(cfg, transform_settings(cfg))


@pytest.mark.parametrize("size", NARROW)
@pytest.mark.parametrize("channels", [3, 5])
def test_a_very_narrow_image_is_a_bad_sample_of_the_evaluation(size, channels):
    """It would be resized to 256 x 16 million pixels."""
    image = noise(*size)
    if channels == 5:
        image = make_bands(np.asarray(image)[..., [0, 1, 2, 0, 1]])
    transform = eval_transform(224, channels=channels, mean=[0.5], std=[0.5])
    with pytest.raises(UnreadableImage, match="too narrow to resize its shorter side to 256"):
        transform(image)
    assert transform(noise(3, 900) if channels == 3 else image[:, :90, :90]).shape[-1] == 224


@pytest.mark.parametrize("size", NARROW)
@pytest.mark.parametrize("chain", [name for name in CHAINS if name != "finetune"])
def test_a_very_narrow_image_can_be_cropped_for_training(size, chain):
    assert augment(noise(*size), train_transform(48, **CHAINS[chain]), 0).shape == (3, 48, 48)
