"""Read the images with which static int8 quantization determines the ranges of activations."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vil.data.classes import normalize_name
from vil.data.datasets.image_list import Images, ImageSource, images_at, iter_image_batches
from vil.tasks.base import Task
from vil.utils.errors import ConfigError, DataError

LEAST, MOST = 16, 256  # images
BATCH = 16


def find_calibration_images(
    folder: str | Path, class_names: Sequence[str], channels: int
) -> list[ImageSource]:
    """Return at most `MOST` images below a folder, evenly spaced in the order of their paths.

    class_names: classes of the model. Subfolders with images must be named after them. If [], any
    names are allowed. Raises ConfigError for another subfolder, for a missing folder, and for fewer
    than `LEAST` images.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"--calibration: there is no folder {root}")
    images = images_at(str(root), channels)
    if len(images) < LEAST:
        raise ConfigError(
            f"--calibration {root}: expected a folder with at least {LEAST} images, got "
            f"{len(images)}"
        )
    parts = (Path(image.name).relative_to(root).parts for image in images)
    folders = dict.fromkeys(first for first, *rest in parts if rest)
    known = set(map(normalize_name, class_names))
    other = [name for name in folders if normalize_name(name) not in known]
    if class_names and other:
        raise ConfigError(
            f"--calibration {root}: the model has no classes for the subfolders "
            f"{_listing(other)}: rename or remove them (classes: {_listing(class_names)})"
        )
    count = min(len(images), MOST)
    return [images[number * len(images) // count] for number in range(count)]


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def iter_inputs(task: Task, images: Images) -> Iterator[Tensor]:
    """Yield the preprocessed images that can be read, in batches (B, channels, H, W)."""
    for batch in iter_image_batches(images, task.preprocess, batch_size=BATCH, workers=0):
        if batch.samples:
            yield torch.stack([sample[0] for sample in batch.samples])


def iter_calibration_batches(task: Task, images: Images) -> Iterator[Tensor]:
    """Yield the preprocessed images in batches (B, channels, H, W). Raises DataError if fewer than
    `LEAST` images can be read."""
    count = 0
    for inputs in iter_inputs(task, images):
        count += len(inputs)
        yield inputs
    if count < LEAST:
        raise DataError(
            f"--calibration: only {count} of {len(images)} images can be read, but at least "
            f"{LEAST} are needed"
        )
