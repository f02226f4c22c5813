"""Build transforms that convert an image to a normalized float32 tensor (c, S, S).

Transforms of gray and RGB images are `ImageTransform`s, whose normalization can be left to the
device.

Shapes: c channels, S image size. The input is a PIL image if c is 1 or 3, otherwise a BandImage
(`vil.data.bands`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data import auto_augment as timm_policies
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from vil.data import TRANSFORMS
from vil.data.bands import PIL_CHANNELS
from vil.data.image import UnreadableImage
from vil.data.pixels import ImageTransform, Normalization
from vil.data.samplers import fork_rng
from vil.utils.errors import one_line
from vil.utils.lookup import lookup

INTERPOLATIONS = {name: v2.InterpolationMode(name) for name in ("bilinear", "bicubic")}
BLUR_SIGMA = (0.1, 2.0)
BLUR_KERNEL = 13  # three times the largest sigma on each side
TRIALS = 8  # seeds with which `build_transform` tries a transform


def posterize(image: Image.Image, bits: int, **kwargs: object) -> Image.Image:
    """Apply timm's posterize to an image. Returns a black image for 0 bits, for which Pillow 13
    raises an error."""
    if bits == 0:
        return Image.new(image.mode, image.size)
    return timm_policies.posterize(image, bits, **kwargs)


# Some policies use 0 bits: rand-m9-mstd0.5-inc1 once in thousands of images, v0 often.
for name in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
    # the type of timm's table is inferred as that of its own functions
    timm_policies.NAME_TO_OP[name] = posterize  # pyrefly: ignore[unsupported-operation]


def train_transform(
    image_size: int,
    *,
    use_timm: bool = False,
    finetune: bool = False,
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
    interpolation: str = "bilinear",
    crop_pct: float = 0.875,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    hflip: float = 0.5,
    vflip: float = 0.0,
    color_jitter: float | Sequence[float] = (0.4, 0.4, 0.4, 0.1, 0.0),
    gray_scale: float = 0.0,
    gaussian_blur: float = 0.0,
    auto_augment: str | None = None,
    re_prob: float = 0.0,
    re_mode: str = "pixel",
    re_count: int = 1,
    registered: Callable | None = None,
    channels: int = 3,
) -> Callable:
    """Build the training transform, by default from torchvision's transforms.

    Args:
        use_timm: use timm's transform, the only one with auto_augment and random erasing (re_*).
        finetune: only resize, crop and flip. Ignored with use_timm.
        crop_pct: with finetune, the shorter side is first resized to image_size / crop_pct.
        scale, ratio: ranges of the area (as a fraction of the image) and of the aspect ratio of the
            random resized crop.
        hflip, vflip, gray_scale, gaussian_blur, re_prob: probabilities.
        color_jitter: strengths of brightness, contrast, saturation and hue, then the probability. A
            single number s means (s, s, s, 0, 1).
        auto_augment: name of a timm policy, which replaces the color jitter.
        re_mode, re_count: fill mode and maximum number of rectangles of timm's RandomErasing.
        registered: result of `build_transform`, which is applied to the RGB image after all of the
            above except for random erasing.
        channels: channels of the result. For 1, the augmented RGB image is converted to gray. For 2
            and for more than 3, only crops, flips and random erasing are applied.
    """
    mode = lookup(INTERPOLATIONS, interpolation, "interpolation")
    strengths, jitter_prob = split_jitter(color_jitter)
    after = [registered] if registered else []
    if use_timm and channels in PIL_CHANNELS:
        settings = dict(
            scale=scale,
            ratio=ratio,
            hflip=hflip,
            vflip=vflip,
            color_jitter=strengths,
            color_jitter_prob=jitter_prob,
            grayscale_prob=gray_scale,
            gaussian_blur_prob=gaussian_blur,
            auto_augment=auto_augment,
            interpolation=interpolation,
            std=tuple(std),
            re_prob=re_prob,
            re_mode=re_mode,
            re_count=re_count,
        )
        # policies fill with the mean as a color, which needs three values
        rgb_mean = tuple(mean) * 3 if len(mean) == 1 else tuple(mean)
        crop, policy, last = timm_transform(image_size, mean=rgb_mean, separate=True, **settings)
        gray = [v2.Grayscale(1)] if channels == 1 else []
        normalization = Normalization(tuple(mean), tuple(std), divide=True)
        erase = last.transforms[-1] if re_prob else None
        return ImageTransform([crop, policy, *after, *gray], normalization, erase)
    steps = [v2.RandomResizedCrop(image_size, scale, ratio, mode)]
    if finetune and not use_timm:
        steps = resize_and_crop(image_size, crop_pct, mode, v2.RandomCrop)
    steps += [v2.RandomHorizontalFlip(hflip), v2.RandomVerticalFlip(vflip)]
    if channels in PIL_CHANNELS and not finetune:
        steps += [
            v2.RandomApply([v2.ColorJitter(*strengths)], jitter_prob),
            v2.RandomGrayscale(gray_scale),
            v2.RandomApply([v2.GaussianBlur(BLUR_KERNEL, BLUR_SIGMA)], gaussian_blur),
        ]
    steps += after
    if use_timm and re_prob:  # of more or fewer channels
        erasing = dict(mode=re_mode, max_count=re_count, num_splits=0, device="cpu")
        erase = RandomErasing(re_prob, **erasing)
        return v2.Compose([normalize(steps, mean, std, channels), erase])
    return normalize(steps, mean, std, channels)


def timm_transform(image_size: int, *, auto_augment: str | None, **settings: Any) -> Any:
    """Build timm's training transform. settings: other arguments of timm's `create_transform`.
    Raises ValueError if timm refuses an argument, such as the policy `auto_augment`."""
    try:
        return create_transform(image_size, is_training=True, auto_augment=auto_augment, **settings)
    except (AssertionError, ValueError) as error:  # timm asserts what it expects of a policy
        raise ValueError(
            f"timm refuses the training transform (auto_augment {auto_augment!r}): {error}"
        ) from error


class CheckedTransform:
    """A registered transform of images that checks what the transform returns."""

    def __init__(self, name: str, transform: Callable[[Image.Image], Any]):
        self.name, self.transform = name, transform

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the transformed image. Raises ValueError if the transform does not return a PIL
        image of the mode and size of its input."""
        expected, result = describe_image(image), self.transform(image)
        if describe_image(result) != expected:
            given = describe_image(result)
            raise ValueError(f"the transform {self.name} must return {expected}, got {given}")
        return result

    def __repr__(self) -> str:
        return f"CheckedTransform({self.name}, {self.transform})"


def describe_image(image: object) -> str:
    """Describe the type, mode and size of an image."""
    if isinstance(image, Image.Image):
        return f"a PIL image of mode {image.mode} and size {image.width}x{image.height}"
    return f"an object of type {type(image).__name__}"


def build_transform(
    name: str, image_size: int, arguments: Mapping[str, Any] | None = None
) -> CheckedTransform:
    """Build a transform that `vil.register_transform` registered, and try it on random pixels.

    image_size: side of the images. arguments: of the function or class that builds the transform.
    Raises ValueError if it raises an error, or if two calls on the same image with the same seed
    give different images: a run could not be resumed exactly.
    """
    pixels = np.random.default_rng(0).integers(256, size=(image_size, image_size, 3))
    example = Image.fromarray(pixels.astype(np.uint8))
    is_exact = True
    try:
        transform = CheckedTransform(name, TRANSFORMS.load(name)(**(arguments or {})))
        for seed in range(TRIALS):
            with fork_rng("augment", seed):
                first = transform(example.copy())
            with fork_rng("augment", seed):
                is_exact &= first == transform(example.copy())
    except Exception as error:  # code of a plug-in raises anything
        reason = error if isinstance(error, ValueError) else one_line(error)
        raise ValueError(f"AUG.TRANSFORM {name}: {reason}") from error
    if not is_exact:
        raise ValueError(
            f"AUG.TRANSFORM {name}: two calls with the same seed give different images; draw only "
            "from the global generators of `random`, numpy and torch, and keep no state"
        )
    return transform


def eval_transform(
    image_size: int,
    *,
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
    interpolation: str = "bilinear",
    crop_pct: float = 0.875,
    channels: int = 3,
) -> Callable:
    """Build the evaluation transform: resize, center-crop and normalize. The shorter side is
    resized to image_size / crop_pct, rounded down. channels: see `train_transform`."""
    mode = lookup(INTERPOLATIONS, interpolation, "interpolation")
    crop = resize_and_crop(image_size, crop_pct, mode, v2.CenterCrop)
    return normalize(crop, mean, std, channels)


class Resize(v2.Resize):
    """v2.Resize to a shorter side, which raises UnreadableImage if the longer side of a very narrow
    image would become so long that the result has more pixels than PIL allows in a file."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        side = max(self.size or ())  # of one number
        shorter, longer = sorted(F.get_size(inpt))
        pixels, limit = side * (side * longer // shorter), Image.MAX_IMAGE_PIXELS
        if limit is not None and pixels > max(limit, 4 * side**2):
            raise UnreadableImage(
                f"the image has a shorter side of {shorter} and a longer side of {longer} pixels, "
                f"which is too narrow to resize its shorter side to {side} pixels"
            )
        return super().transform(inpt, params)


def resize_and_crop(
    image_size: int, crop_pct: float, mode: v2.InterpolationMode, crop: Callable
) -> list[Callable]:
    """Return the transforms that resize an image's shorter side to image_size / crop_pct and then
    crop the image to image_size. crop: class of the crop, such as v2.CenterCrop."""
    return [Resize(int(image_size / crop_pct), mode), crop(image_size)]


def normalize(
    steps: Sequence[Callable], mean: Sequence[float], std: Sequence[float], channels: int = 3
) -> ImageTransform | v2.Compose:
    """Return the transform that applies `steps`, converts an image to a float32 tensor in 0..1 and
    then normalizes each channel by mean and std."""
    if channels in PIL_CHANNELS:
        gray = [v2.Grayscale(1)] if channels == 1 else []
        return ImageTransform([*steps, *gray], Normalization(tuple(mean), tuple(std)))
    scale = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([*steps, v2.ToPureTensor(), scale, v2.Normalize(list(mean), list(std))])


def split_jitter(color_jitter: float | Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Convert the argument color_jitter of `train_transform` to ((brightness, contrast, saturation,
    hue), probability). Raises ValueError unless color_jitter is one number or five."""
    if isinstance(color_jitter, (int, float)):
        return (color_jitter, color_jitter, color_jitter, 0.0), 1.0
    if len(color_jitter) != 5:
        raise ValueError(
            "color_jitter must be one strength, or five numbers (brightness, contrast, saturation, "
            f"hue, probability); given {color_jitter!r}"
        )
    *strengths, probability = color_jitter
    return tuple(strengths), probability
