"""Read the images of a dataset to collect sizes, colors, content hashes and unreadable images.

The results for a million images take about 50 MB of memory. Shapes: N images that were read, C
channels.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vil.data.bands import BandImage
from vil.data.batch import BadSample
from vil.data.robust_dataset import RobustDataset
from vil.data.samplers import Position
from vil.data.workers import build_data_loader, iter_batches
from vil.utils.rgb import LARGEST

BATCH = 64  # images per batch of a worker
DIGEST = 16  # bytes of a hash; among a billion different images, the risk of equal hashes is 1e-21
BLANK_STD = 0.01  # standard deviation below which an image counts as blank, for values in 0..1
LISTED = 10  # images of each kind that are listed by name


class ImageStats(NamedTuple):
    """Statistics of an image, with pixel values scaled to 0..1."""

    digest: bytes  # hash of the content
    size: tuple[int, int]  # (width, height) in pixels
    mean: np.ndarray  # (C,) mean of each channel
    square: np.ndarray  # (C,) mean of the squares
    largest: int | None  # for an image of 16 bits, its largest value before the conversion


class StatsBatch(NamedTuple):
    """Statistics of the readable images of a batch, their dataset indices, and the images that
    cannot be read."""

    rows: list[tuple[ImageStats, int]]
    bad_samples: tuple[BadSample, ...]


class InspectedDataset(Dataset):
    """A dataset that wraps another one and returns the `ImageStats` of each image, as a 1-tuple."""

    collate = StatsBatch

    def __init__(self, dataset: Any):
        self.dataset, self.classes = dataset, dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[ImageStats]:
        image = self.dataset.image(index)
        if hasattr(self.dataset, "content"):
            content = self.dataset.content(index)
        else:
            content = np.asarray(image).tobytes()
        digest = hashlib.blake2b(content, digest_size=DIGEST).digest()
        gray = getattr(self.dataset, "channels", 3) == 1
        moments = channel_moments(image.convert("L") if gray else image)
        is_bands = isinstance(image, BandImage)
        largest = image.largest if is_bands else image.info.get(LARGEST)
        return (ImageStats(digest, (image.width, image.height), *moments, largest),)

    def sample_name(self, index: int) -> str:
        return self.dataset.sample_name(index)


@dataclass
class Inspection:
    """The result of reading the images of one split.

    num_images: number of images in the split. num_opened: number of images tried.
    unreadable: number of images that could not be read. bad_samples: the first of these images.
    mean, std (C,): mean and standard deviation of the pixel values, scaled to 0..1, of each
    channel. All images have the same weight, whatever their size. Empty if no image could be read.
    largest: the largest value in the images of 16 bits, before their conversion; 0 without any.
    """

    num_images: int
    num_opened: int
    unreadable: int
    bad_samples: list[BadSample]
    indices: np.ndarray  # (N,) int64: index of each image in the dataset
    digests: np.ndarray  # (N,) bytes
    sizes: np.ndarray  # (N, 2) int32: width, height
    is_blank: np.ndarray  # (N,) bool
    mean: np.ndarray
    std: np.ndarray
    largest: int


def channel_moments(image: Image.Image | BandImage) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays (C,): the mean value and the mean squared value of each channel.

    image: an 8-bit PIL image or a BandImage. Its values are first scaled to 0..1.
    """
    if isinstance(image, BandImage):
        values = image.numpy().reshape(len(image), -1)
        values = values / 255 if values.dtype == np.uint8 else values.astype(np.float64)
        return values.mean(1), (values**2).mean(1)
    counts = np.array(image.histogram(), np.float64).reshape(-1, 256)
    counts /= counts.sum(1, keepdims=True)
    values = np.arange(256) / 255
    return counts @ values, counts @ values**2


def inspect(dataset: Any, *, workers: int = 0, max_images: int | None = None) -> Inspection:
    """Read the images of a dataset and return their statistics.

    workers: number of worker processes; 0 reads in this process. max_images: read at most this many
    images, evenly spaced in the dataset's order.
    """
    total = len(dataset)
    opened = min(total, total if max_images is None else max_images)
    indices = np.linspace(0, total - 1, opened).astype(np.int64)
    digests, sizes = np.empty(opened, f"V{DIGEST}"), np.empty((opened, 2), np.int32)
    is_blank, read = np.zeros(opened, bool), np.empty(opened, np.int64)
    bad_samples, unreadable, count, means, squares = [], 0, 0, 0.0, 0.0
    largest = 0
    samples = RobustDataset(InspectedDataset(dataset))
    order = (
        [Position(0, i, i) for i in indices[first : first + BATCH].tolist()]
        for first in range(0, opened, BATCH)
    )
    loader = build_data_loader(samples, order, workers=workers)
    with closing(iter_batches(loader)) as batches:
        for batch in batches:
            unreadable += len(batch.bad_samples)
            bad_samples += batch.bad_samples[: LISTED - len(bad_samples)]
            for stats, index in batch.rows:
                digests[count], sizes[count], read[count] = stats.digest, stats.size, index
                variance = (stats.square - stats.mean**2).max()
                is_blank[count] = variance < BLANK_STD**2
                largest = max(largest, stats.largest or 0)
                means, squares, count = means + stats.mean, squares + stats.square, count + 1
    mean = np.atleast_1d(means / count) if count else np.empty(0)
    std = np.sqrt(np.maximum(squares / count - mean**2, 0)) if count else np.empty(0)
    return Inspection(
        total,
        opened,
        unreadable,
        bad_samples,
        indices=read[:count],
        digests=digests[:count],
        sizes=sizes[:count],
        is_blank=is_blank[:count],
        mean=mean,
        std=std,
        largest=largest,
    )


def size_range(sizes: Sequence[tuple[int, int]] | np.ndarray) -> list[tuple[int, int]]:
    """Return the smallest, median and largest (width, height) by area, or [] if there are none."""
    if not len(sizes):
        return []
    sizes = np.asarray(sizes, np.int64)
    order = np.argsort(sizes.prod(1), kind="stable")
    picked = sizes[order[[0, (len(order) - 1) // 2, -1]]]
    return [tuple(size) for size in picked.tolist()]


class Duplicates(NamedTuple):
    """Images with identical content.

    within: {split: number of images that repeat an earlier image of the split}.
    leaks: {(a, b): number of images of split b that also occur in split a}.
    examples: the first pairs of identical images for each key of `within` and `leaks`. Each image
    is given as (split, index).
    """

    within: dict[str, int]
    leaks: dict[tuple[str, str], int]
    examples: dict[Any, list[tuple[tuple[str, int], tuple[str, int]]]]


def find_duplicates(inspections: Mapping[str, Inspection]) -> Duplicates:
    """Find identical images within each split and between splits, and return them as `Duplicates`.
    inspections: {split: its Inspection}."""
    found, names = Duplicates({}, {}, {}), list(inspections)
    firsts = {}  # {split: (sorted distinct contents, index of the first image of each)}
    for name, split in inspections.items():
        contents, first, inverse = np.unique(split.digests, return_index=True, return_inverse=True)
        firsts[name] = contents, split.indices[first]
        copies = np.setdiff1d(np.arange(len(split.digests)), first)
        if len(copies):
            found.within[name] = len(copies)
            found.examples[name] = [
                ((name, int(split.indices[first[inverse[i]]])), (name, int(split.indices[i])))
                for i in copies[:LISTED]
            ]
    for number, b in enumerate(names):
        split = inspections[b]
        for a in names[:number]:
            contents, index = firsts[a]
            shared = np.flatnonzero(np.isin(split.digests, contents))
            if not len(shared):
                continue
            found.leaks[a, b] = len(shared)
            places = np.searchsorted(contents, split.digests[shared[:LISTED]])
            found.examples[a, b] = [
                ((a, int(index[place])), (b, int(split.indices[i])))
                for place, i in zip(places, shared[:LISTED])
            ]
    return found
