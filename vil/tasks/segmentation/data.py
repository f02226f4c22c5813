"""Datasets of images with masks: open them, count their pixels, and check masks against images.

Shapes: N images, K classes, H W size of an image.
"""

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vil.data import keyword_only
from vil.data.batch import collate
from vil.data.dataset import SPLITS
from vil.data.image import UnreadableImage
from vil.data.target_summary import GROUPS, TargetSummary, select_examples
from vil.tasks.segmentation.layouts import SEGMENTATION_SETS, Source
from vil.tasks.segmentation.predictions import default_palette
from vil.tasks.segmentation.transforms import MaskTransform
from vil.utils.console import printable
from vil.utils.lookup import lookup
from vil.utils.rgb import WHITE

logger = logging.getLogger(__name__)

MAX_COUNTED = 2000  # masks that `count_pixels` reads
LISTED = 5  # masks in a message


class MaskDataset(Dataset):
    """A dataset of images with masks.

    dataset[i] is (image, mask), which `transform` has converted to (Pixels, mask tensor); an RGB
    PIL image and an array without a transform. A mask is (H, W) int16 of class numbers 0..K-1, and
    IGNORE for pixels without a label.

    classes: names of the K classes. palette (K, 3) uint8: their colors in drawings. Indexing raises
    UnreadableImage if an image or its mask cannot be read, if they have different sizes, or if the
    mask has values without a class, so that loaders skip and count the image.
    """

    collate = staticmethod(collate)
    target_type = "mask"
    value_range: Sequence[float] = ()  # see `to_rgb`
    background: Sequence[int] = WHITE  # behind transparent pixels, see `to_rgb`

    def __init__(self, source: Source, split: str, transform: MaskTransform | None = None):
        lookup(SPLITS, split, "split")
        self.source, self.split, self.transform = source, split, transform
        self.classes, self.palette = list(source.classes), source.palette
        self.samples = np.arange(len(source))  # (N,) their numbers in the source
        # class number of each number of the source from -1, IGNORE, on
        self.numbers = np.arange(-1, len(self.classes), dtype=np.int16)
        self._counts: MaskCounts | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, mask = self.image(index), self.mask(index)
        if image.size != mask.shape[::-1]:
            raise UnreadableImage(explain_sizes(mask.shape[::-1], image.size))
        return (image, mask) if self.transform is None else self.transform(image, mask)

    def image(self, index: int) -> Image.Image:
        """Return an image in RGB, turned upright by its EXIF orientation."""
        options = dict(value_range=self.value_range, background=self.background)
        return self.source.image(int(self.samples[index]), **options)

    def mask(self, index: int) -> np.ndarray:
        """Return the mask (H, W) int16 of an image."""
        return self.numbers[self.source.mask(int(self.samples[index])) + 1]

    def sample_name(self, index: int) -> str:
        """Return the path of an image below the root of the dataset, or its name."""
        return self.source.name(int(self.samples[index]))

    def content(self, index: int) -> bytes:
        """Return the bytes of the image file, see `ImageDataset.content`."""
        return self.source.content(int(self.samples[index]))

    def reorder_classes(self, names: Sequence[str]) -> None:
        """Renumber the classes so that they have the order of `names`: `classes` in any order, and
        possibly further classes, which have no pixels."""
        number = {name: index for index, name in enumerate(names)}
        order = np.array([number[name] for name in self.classes], np.int16)
        palette = default_palette(len(names))
        palette[order] = self.palette
        self.numbers = np.array([-1, *order], np.int16)[self.numbers + 1]
        self.classes, self.palette, self._counts = list(names), palette, None

    def select(self, indices: np.ndarray, split: str) -> "MaskDataset":
        """Return the images at `indices`, in this order, as a dataset for `split`."""
        part = copy(self)
        part.samples, part.split, part._counts = self.samples[indices], split, None
        return part

    def count(self) -> "MaskCounts":
        """Read all masks once, and return the number of pixels of each class in each."""
        if self._counts is None:
            self._counts = count_masks(self, np.arange(len(self)))
        return self._counts


class MaskCounts(NamedTuple):
    """Pixels of N masks. pixels (N, K) int64: labeled pixels of each class. sizes (N, 2): width and
    height, 0 if the mask is unusable. faults: {index of a mask: why it is unusable}."""

    pixels: np.ndarray
    sizes: np.ndarray
    faults: dict[int, str]


def count_masks(dataset: MaskDataset, indices: np.ndarray) -> MaskCounts:
    """Count the pixels of each class in the masks `indices` (n,) of a dataset."""
    pixels = np.zeros((len(indices), len(dataset.classes)), np.int64)
    sizes, faults = np.zeros((len(indices), 2), np.int64), {}
    for row, index in enumerate(indices.tolist()):
        try:
            mask = dataset.mask(index)
        except OSError as error:
            faults[index] = " ".join(str(error).split())
            continue
        sizes[row] = mask.shape[::-1]
        pixels[row] = np.bincount(mask.ravel() + 1, minlength=pixels.shape[1] + 1)[1:]
    return MaskCounts(pixels, sizes, faults)


def count_pixels(dataset: MaskDataset, max_masks: int = MAX_COUNTED) -> np.ndarray:
    """Count the labeled pixels of each class, (K,) int64, in at most `max_masks` evenly spaced
    masks of a dataset. Unusable masks are left out."""
    indices = np.linspace(0, len(dataset) - 1, min(len(dataset), max_masks)).astype(np.int64)
    return count_masks(dataset, indices).pixels.sum(0)


def summarize_masks(dataset: MaskDataset) -> TargetSummary:
    """Count, for each class of a dataset, the images that show it, and its share of the pixels."""
    names, counts = dataset.classes, dataset.count()
    shown, total = counts.pixels > 0, int(counts.sizes.prod(1).sum())
    per_class = counts.pixels.sum(0)
    labeled = int(per_class.sum())
    shares = [f"{name} {count / max(labeled, 1):.2%}" for name, count in zip(names, per_class)]
    more = ", ..." if len(names) > GROUPS else ""
    notes = [
        f"{total} pixels, {1 - labeled / max(total, 1):.2%} of them without a label",
        f"share of the labeled pixels: {printable(', '.join(shares[:GROUPS]))}{more}",
    ]
    groups = [
        (name, select_examples(np.flatnonzero(shown[:, number])))
        for number, name in enumerate(names[:GROUPS])
    ]
    return TargetSummary(dict(zip(names, shown.sum(0).tolist())), {}, notes, groups)


@dataclass(frozen=True)
class MaskMisfit:
    """One way in which masks do not fit their images, as text. is_common: whether so many do not
    fit that the dataset cannot be used for training. stops_evaluation: whether the same holds for
    evaluation."""

    text: str
    is_common: bool = False
    stops_evaluation: bool = False

    def __str__(self) -> str:
        return self.text


def find_misfits(
    dataset: MaskDataset, indices: np.ndarray, sizes: np.ndarray, max_bad_fraction: float = 0.01
) -> list[MaskMisfit]:
    """Return the ways in which masks do not fit their images: unusable masks, masks of another
    size, and masks without a labeled pixel.

    indices (n,): images that were opened. sizes (n, 2): their width and height. max_bad_fraction:
    share of unusable images at which training and evaluation stop (DATA.MAX_BAD_FRACTION).
    """
    counts, total = dataset.count(), max(len(dataset), 1)
    resized = {
        index: explain_sizes(counts.sizes[index], size)
        for index, size in zip(indices.tolist(), sizes.tolist())
        if index not in counts.faults and counts.sizes[index].tolist() != size
    }
    empty = np.flatnonzero((counts.pixels.sum(1) == 0) & (counts.sizes[:, 0] > 0)).tolist()
    kinds = [
        ("have an unusable mask", counts.faults, max_bad_fraction, True),
        ("have a mask of another size", resized, max_bad_fraction, True),
        ("have no labeled pixel", dict.fromkeys(empty, ""), 0.5, False),
    ]
    found = []
    for what, rows, limit, stops_evaluation in kinds:
        names = [
            printable(dataset.sample_name(index)) + (f" ({printable(why)})" if why else "")
            for index, why in list(rows.items())[:LISTED]
        ]
        more = f"; and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
        text = f"{len(rows)} of {len(dataset)} images {what}: {'; '.join(names)}{more}"
        if rows:
            found.append(MaskMisfit(text, len(rows) > limit * total, stops_evaluation))
    return found


def explain_sizes(mask: Sequence[int], image: Sequence[int]) -> str:
    """Return the message about a mask of another size than its image, both (width, height)."""
    (w, h), (width, height) = mask, image
    is_turned = (w, h) == (height, width)
    hint = ": masks must show the image as it is after its EXIF orientation" if is_turned else ""
    return f"the mask has {w} x {h} pixels, but the image has {width} x {height}{hint}"


def build_segmentation_set(
    name: str,
    root: str | Path,
    split: str,
    transform: MaskTransform | None = None,
    *,
    ignore: int = 255,
    quiet: bool = False,
    **own: Any,
) -> MaskDataset:
    """Open one split, "train", "val" or "test", of the dataset `name`, a key of SEGMENTATION_SETS.

    ignore: value of pixels without a label in mask files. quiet: log no warnings. own: further
    arguments of the function SEGMENTATION_SETS[name]. Raises DataError if the dataset is invalid.
    """
    open_source = lookup(SEGMENTATION_SETS, name, "segmentation set")
    lookup(SPLITS, split, "split")
    source = open_source(root, split, ignore=ignore, **own)
    for note in () if quiet else source.notes:
        logger.warning(note)
    return MaskDataset(source, split, transform)


def own_arguments(name: str) -> list[str]:
    """Return the names of the arguments of the dataset `name` that DATA.KWARGS may set."""
    own = keyword_only(lookup(SEGMENTATION_SETS, name, "segmentation set"))
    return [argument for argument in own if argument != "ignore"]
