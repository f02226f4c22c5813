"""Images and masks are transformed together, exactly and repeatably."""

import numpy as np
import pytest
import torch
from PIL import Image

from vil.data.samplers import fork_rng
from vil.tasks.segmentation import IGNORE
from vil.tasks.segmentation.transforms import eval_transform, train_transform

PLAIN = dict(color_jitter=0.0, max_share=1.0)
COLORS = dict(color_jitter=(0.4, 0.4, 0.4, 0.1, 1.0), gray_scale=0.2, gaussian_blur=0.5)


def coordinates(height, width):
    """An image whose red and green are the column and row of a pixel, and a mask with its index."""
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([columns, rows, 0 * rows], axis=-1).astype(np.uint8)
    return Image.fromarray(image), (rows * width + columns).astype(np.int16)


def random_mask(height, width, classes=3, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(IGNORE, classes, (height, width), dtype=np.int16)


@pytest.mark.parametrize("quarters", [False, True])
def test_image_and_mask_stay_aligned(quarters):
    image, mask = coordinates(120, 150)
    transform = train_transform(64, scale=(1, 1), hflip=0.5, vflip=0.5, quarters=quarters, **PLAIN)
    corners = set()
    for seed in range(24):
        with fork_rng("augment", seed):
            pixels, cropped = transform(image, mask)
        red, green, _ = pixels.image.long()
        assert torch.equal(cropped.long(), green * 150 + red)
        first = red[0, 0] - red[0, 1], green[0, 0] - green[0, 1]
        corners.add((*map(int, first), int(green[0, 0] - green[1, 0]), int(red[0, 0] - red[1, 0])))
    assert len(corners) == (8 if quarters else 4)  # all reflections and rotations occur


@pytest.mark.parametrize("factor", [0.6, 1.7, 3.0])
def test_scaled_masks_are_not_shifted(factor):
    image, mask = coordinates(120, 150)
    transform = train_transform(48, scale=(factor, factor), hflip=0, **PLAIN)
    with fork_rng("augment", 1):
        pixels, cropped = transform(image, mask)
    inner = (slice(4, -4),) * 2  # at the edge, the interpolation of the image is one-sided
    differences = [
        (pixels.image[0] - cropped % 150)[inner].float(),
        (pixels.image[1] - cropped // 150)[inner].float(),
    ]
    for difference in differences:
        assert difference.abs().max() <= 1
        assert difference.mean().abs() < 0.3


@pytest.mark.parametrize(
    "options", [{}, COLORS, dict(auto_augment="3a"), dict(auto_augment="rand-m9-n2-t3a")]
)
def test_same_seed_same_sample(options):
    image, mask = coordinates(100, 90)
    transform = train_transform(32, quarters=True, vflip=0.5, **options)

    def sample(seed):
        with fork_rng("augment", seed):
            return transform(image, mask)

    results = [sample(seed) for seed in range(6)]
    for seed, (pixels, cropped) in enumerate(results):
        again = sample(seed)
        assert torch.equal(pixels.image, again[0].image)
        assert torch.equal(cropped, again[1])
    assert len({cropped.numpy().tobytes() for _, cropped in results}) == 6


def test_colors_leave_the_mask_alone():
    image, mask = coordinates(100, 90)
    masks = []
    for options in (dict(color_jitter=(0.4, 0.4, 0.4, 0.1, 1.0)), dict(color_jitter=0.0)):
        with fork_rng("augment", 5):
            masks.append(train_transform(32, hflip=0, max_share=1.0, **options)(image, mask))
    assert torch.equal(masks[0][1], masks[1][1])
    assert not torch.equal(masks[0][0].image, masks[1][0].image)


def test_largest_share_of_a_crop():
    mask = np.zeros((200, 200), np.int16)
    mask[:, 150:] = 1  # a quarter, so most crops have a single class
    image = Image.new("RGB", (200, 200))

    def shares(max_share):
        transform = train_transform(40, scale=(1, 1), max_share=max_share)
        for seed in range(60):
            with fork_rng("augment", seed):
                _, cropped = transform(image, mask)
            yield max(torch.bincount(cropped.flatten().long()).tolist()) / cropped.numel()

    limited, any_share = list(shares(0.75)), list(shares(1.0))
    assert np.mean(np.array(any_share) > 0.75) > 0.6
    assert np.mean(np.array(limited) > 0.75) < 0.4  # of ten crops, the last is kept


def test_share_counts_labeled_pixels_only():
    mask = np.full((64, 64), IGNORE, np.int16)
    mask[:, 31:33] = 0, 1
    transform = train_transform(32, scale=(1, 1), max_share=0.6)
    for seed in range(20):
        with fork_rng("augment", seed):
            _, cropped = transform(Image.new("RGB", (64, 64)), mask)
        assert set(cropped.unique().tolist()) == {IGNORE, 0, 1}


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 700), (700, 1), (3, 5), (33, 31), (32, 32), (500, 40)]
)
@pytest.mark.parametrize("scale", [(0.5, 2.0), (1.0, 1.0), (4.0, 8.0)])
def test_any_size_of_image(size, scale):
    mask = random_mask(*size)
    transform = train_transform(32, scale=scale, quarters=True, **COLORS)
    for seed in range(3):
        with fork_rng("augment", seed):
            pixels, cropped = transform(Image.new("RGB", size[::-1]), mask)
        assert (pixels.image.shape, pixels.image.dtype) == ((3, 32, 32), torch.uint8)
        assert (cropped.shape, cropped.dtype) == ((32, 32), torch.int16)
        assert set(cropped.unique().tolist()) <= set(np.unique(mask).tolist())


def test_ignored_pixels_stay_ignored():
    _, mask = coordinates(90, 90)
    hidden = np.where(random_mask(90, 90) == IGNORE, IGNORE, mask).astype(np.int16)
    transform = train_transform(32, quarters=True)
    for seed in range(10):
        crops = []
        for each in (mask, hidden):
            with fork_rng("augment", seed):
                crops.append(transform(Image.new("RGB", (90, 90)), each)[1])
        expected = torch.from_numpy(hidden.ravel())[crops[0].flatten().long()].view(32, 32)
        assert torch.equal(crops[1], expected)


@pytest.mark.parametrize("policy", ["v0", "original", "rand-m9-mstd0.5-inc1", "augmix-m5"])
def test_policies_that_move_pixels_are_refused(policy):
    with pytest.raises(ValueError, match=r"moves pixels \(.*Rotate"):
        train_transform(32, auto_augment=policy)


def test_unknown_policy():
    with pytest.raises(ValueError, match="timm refuses"):
        train_transform(32, auto_augment="no-policy")


@pytest.mark.parametrize(("test_size", "size"), [(0, (50, 70)), (25, (25, 35)), (100, (100, 140))])
def test_evaluation_keeps_the_mask(test_size, size):
    mask = random_mask(50, 70)
    pixels, target = eval_transform(test_size)(Image.new("RGB", (70, 50), (124, 116, 104)), mask)
    assert pixels.image.shape == (3, *size)
    assert torch.equal(target, torch.from_numpy(mask))
    assert pixels.to_float().abs().max() < 0.02  # normalized: ImageNet's mean
