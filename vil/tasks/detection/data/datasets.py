"""Datasets of images with boxes and masks, whose annotations are in COCO's format, or are converted
to it (see layouts.py).

Unusable annotations are dropped when the annotations are read, with one warning. Evaluation reads
the annotations again, and counts those with a box, see `coco_eval.load_truth`. Boxes are clipped
when an image is read, because its size may differ from that in the annotations.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from vil.data import keyword_only
from vil.data.dataset import SPLITS
from vil.data.image import UnreadableImage, read_image, read_size
from vil.data.synthetic.scenes import NUM_TRAIN, NUM_VAL, find_scenes
from vil.tasks.detection.data.batch import Target, collate
from vil.tasks.detection.data.coco_json import (
    Annotations,
    AnnotationSource,
    read_annotations,
    to_source,
)
from vil.tasks.detection.data.fake import fake_boxes
from vil.tasks.detection.data.layouts import Files, find_layout, open_layout
from vil.tasks.detection.data.misfits import Misfit, compare_sizes, find_misfits
from vil.tasks.detection.data.transforms import clip_boxes
from vil.utils.errors import DataError
from vil.utils.lookup import lookup
from vil.utils.rgb import WHITE
from vil.utils.safe_files import join_roots, path_below, regular_file, unicode_hint

logger = logging.getLogger(__name__)

Transform = Callable[[Tensor, Target], tuple[Tensor, Target]]
SIZES = 256  # images whose size is compared with the annotation file before a run


class CocoDataset(Dataset):
    """Dataset of images and targets in COCO's format.

    dataset[i] returns an image (3, H, W) uint8 RGB, and a target as described by `DetectionBatch`,
    without crowd annotations. Label l stands for the category with name `classes[l - 1]` and id
    `category_ids[l - 1]`, which is None if the annotation file does not have the category. The
    split "train" omits images without a usable box, unless keep_empty is set; `num_empty` counts
    these images. Indexing raises UnreadableImage if an image cannot be read.
    """

    collate = staticmethod(collate)
    target_type = "boxes"
    value_range: Sequence[float] = ()  # see `to_rgb`
    background: Sequence[int] = WHITE  # behind transparent pixels, see `to_rgb`

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path | AnnotationSource,
        split: str,
        transform: Transform | None = None,
        *,
        masks: bool = False,
        keep_empty: bool = False,
        roots: Sequence[str | Path] = (),
        quiet: bool = False,
    ):
        """Read the annotations and check that the images exist.

        images: folder of the images. annotations: JSON file, or an `AnnotationSource`. split:
        "train", "val" or "test". masks: also read masks. keep_empty: keep training images without a
        usable box. roots: additional folders to which symbolic links to images may point. quiet:
        log no warnings.

        Raises DataError for an invalid annotation file, for images that are missing or outside of
        the allowed folders, and for a training set without a usable box.
        """
        lookup(SPLITS, split, "split")
        is_source = isinstance(annotations, AnnotationSource)
        self.annotations = annotations if is_source else Path(annotations)
        self.folder = Path(images)
        self.split, self.transform = split, transform
        table = read_annotations(annotations, masks=masks)
        self.classes, self.category_ids = table.classes, table.category_ids
        self.dropped = table.dropped
        notes = list(to_source(annotations).notes)
        if table.dropped:
            counts = format_counts(table.count_dropped())
            has_box = (
                np.isfinite(table.boxes).all(axis=1) & (table.images >= 0) & (table.labels > 0)
            )
            num_counted = int((has_box & (table.reasons > 0)).sum()) if split != "train" else 0
            but = f", but AP counts {num_counted} of them, as pycocotools does"
            notes.append(
                f"{table.path}: {len(table.dropped)} of {len(table.reasons)} annotations are "
                f"dropped ({counts}){but if num_counted else ''}; run vil detect check to list them"
            )
        is_test = split != "train" and len(table.reasons) > 0
        if is_test and masks and not table.segmentations.usable.any():
            notes.append(f"{table.path} has no usable segmentation, so the AP of masks is NaN")
        for note in () if quiet else notes:
            logger.warning(note)
        self.segmentations, self.misfits = table.segmentations, tuple(find_misfits(table))
        # rows[first[i]:last[i]] are the usable annotations of image i
        usable = (table.reasons == 0) & ~table.crowd
        rows, self.num_empty = np.flatnonzero(usable), table.count_empty(usable)
        if split == "train" and not len(rows):
            reason = "; ".join([explain_none(table), *map(str, self.misfits)])
            raise DataError(f"{annotations} has no usable box to train with{reason}")
        self.rows = rows[np.argsort(table.images[rows], kind="stable")]
        counts = np.bincount(table.images[rows], minlength=len(table.names))
        last = np.cumsum(counts)
        kept = np.flatnonzero(counts) if split == "train" and not keep_empty else ...
        self.first, self.last = (last - counts)[kept], last[kept]
        self.boxes, self.labels = table.boxes[self.rows], table.labels[self.rows]
        self.names, self.image_ids = table.names[kept], table.image_ids[kept]
        self.sizes = table.sizes[kept]  # (N, 2): width and height in the annotation file
        wide = self.sizes[:, 0] >= self.sizes[:, 1]
        self.groups = wide.astype(np.int64)  # (N,): 0 tall, 1 wide
        if missing := missing_images(self.folder, map(os.fsdecode, self.names.tolist()), roots):
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise DataError(
                f"images of {annotations} are missing from {self.folder}: "
                f"{', '.join(missing[:5])}{more}{unicode_hint(self.folder, missing[0])}"
            )

    def __len__(self) -> int:
        return len(self.names)

    def content(self, index: int) -> bytes:
        """Return the bytes of the image file."""
        return regular_file(self.folder / self.sample_name(index)).read_bytes()

    def image(self, index: int) -> Image.Image:
        """Return the image `index` in RGB. Raises UnreadableImage if it cannot be read."""
        path = self.folder / self.sample_name(index)
        return read_image(path, self.value_range, background=self.background)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        image = F.pil_to_tensor(self.image(index))
        target = self.target(index, *image.shape[-2:])
        if self.transform is not None:
            image, target = self.transform(image, target)
        return image, target

    def target(self, index: int, height: int, width: int) -> Target:
        """Return the target of the image `index`. height, width: size of the image in pixels."""
        own = slice(self.first[index], self.last[index])
        target: Target = {
            "boxes": torch.from_numpy(self.boxes[own].copy()),
            "labels": torch.from_numpy(self.labels[own].copy()),
            "image_id": int(self.image_ids[index]),
        }
        if self.segmentations is not None:
            masks = torch.zeros(len(target["labels"]), height, width, dtype=torch.uint8)
            for mask, row in zip(masks, self.rows[own].tolist()):
                mask.copy_(torch.from_numpy(self.segmentations.bitmap(row, height, width)))
            target["masks"] = masks
        return clip_boxes(target, (height, width))

    def sample_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Read the sizes of at most SIZES evenly spaced images; skip those that cannot be read.

        Returns the indices (n,) and the (width, height) of the images, (n, 2).
        """
        indices, sizes = [], []
        for index in np.linspace(0, len(self) - 1, min(len(self), SIZES)).astype(int).tolist():
            with suppress(UnreadableImage):
                sizes.append(read_size(self.folder / self.sample_name(index)))
                indices.append(index)
        return np.array(indices, np.int64), np.array(sizes, np.int64).reshape(-1, 2)

    def find_misfits(self, indices: np.ndarray, sizes: np.ndarray) -> list[Misfit]:
        """Return the ways in which annotations do not fit their images.

        indices (n,): images that were opened. sizes (n, 2): their width and height.
        """
        names = [self.sample_name(index) for index in indices.tolist()]
        return [*self.misfits, *compare_sizes(names, self.sizes[indices], sizes)]

    def select(self, indices: np.ndarray, split: str, *, keep_empty: bool = False) -> "CocoDataset":
        """Return the images at `indices`, in this order, as a dataset.

        split: the split that the images form. keep_empty: see `__init__`. Raises DataError if a
        training set has no usable box.
        """
        counts = self.last - self.first
        num_empty = int((counts[indices] == 0).sum())
        if split == "train" and not keep_empty:
            indices = indices[counts[indices] > 0]
        ends = np.cumsum(counts[indices])
        starts = ends - counts[indices]
        if split == "train" and not (len(ends) and ends[-1]):
            raise DataError(f"{self.annotations}: no image of the {split} part has a usable box")
        rows = np.repeat(self.first[indices] - starts, counts[indices]) + np.arange(ends[-1:].sum())
        part = copy(self)
        part.split, part.first, part.last, part.num_empty = split, starts, ends, num_empty
        for name in ("rows", "boxes", "labels"):
            setattr(part, name, getattr(self, name)[rows])
        for name in ("names", "image_ids", "sizes"):
            setattr(part, name, getattr(self, name)[indices])
        part.groups = None if self.groups is None else self.groups[indices]
        source = to_source(self.annotations)
        part.annotations = replace(source, image_ids=frozenset(part.image_ids.tolist()))
        if split != "train":
            part.misfits = ()  # of the whole file: reported with the training images
        return part

    def count_boxes(self) -> np.ndarray:
        """Count the boxes of each class in each image. Returns (N, K) int64."""
        num_classes = len(self.classes)
        images = np.repeat(np.arange(len(self)), self.last - self.first)
        flat = np.bincount(
            images * num_classes + self.labels - 1, minlength=len(self) * num_classes
        )
        return flat.reshape(len(self), num_classes)

    def reorder_classes(self, names: Sequence[str]) -> None:
        """Renumber the labels so that the classes have the order of `names`.

        names: `classes` in any order, and possibly further classes, which have no objects.
        """
        label = {name: index for index, name in enumerate(names, 1)}
        labels = np.array([0, *(label[name] for name in self.classes)])
        ids = dict(zip(self.classes, self.category_ids))
        self.labels = labels[self.labels]
        self.category_ids = [ids.get(name) for name in names]
        self.classes = list(names)

    def sample_name(self, index: int) -> str:
        """Return the path of the image `index`, relative to the image folder."""
        return os.fsdecode(self.names[index])


def missing_images(
    folder: Path, names: Iterable[str], roots: Sequence[str | Path] = ()
) -> list[str]:
    """Return the file names in `names` that do not exist in the folder.

    roots: additional folders to which symbolic links may point. Raises DataError if the folder does
    not exist, if a name is a path outside of it, or if a symbolic link leads out of the folder and
    of `roots`.
    """
    if not folder.is_dir():
        raise DataError(f"there is no image folder {folder}")
    links: dict[str, dict[str, bool]] = {}  # folder -> {file: whether it is a link}
    missing, inside = [], os.path.join(os.path.abspath(folder), "")
    for name in names:
        # otherwise, an annotation file could give access to any file
        if not os.path.abspath(folder / name).startswith(inside):
            raise DataError(f"the file_name {name!r:.80} is not inside of the folder {folder}")
        parent, file = os.path.split(name)
        if parent not in links:
            below = path_below(folder, parent, "a file_name", roots)
            # to query each file takes minutes for COCO on a network disk
            entries = os.scandir(below) if os.path.isdir(below) else ()
            links[parent] = {entry.name: entry.is_symlink() for entry in entries}
        if file not in links[parent]:
            missing.append(name)
        elif links[parent][file]:
            path_below(folder, name, "a file_name", roots)
    return missing


def explain_none(table: Annotations) -> str:
    """Return text for the end of an error message: why an annotation file has no usable box."""
    if not len(table.reasons):
        return ": it has no annotations"
    crowds = int((table.crowd & (table.reasons == 0)).sum())
    counts = table.count_dropped() | ({"a crowd": crowds} if crowds else {})
    return f", of {len(table.reasons)} annotations ({format_counts(counts)})"


def format_counts(counts: dict[str, int]) -> str:
    """Return text for a message: the number of annotations that are dropped for each reason.

    counts: {reason: number of annotations}.
    """
    return ", ".join(f"{reason}: {count}" for reason, count in counts.items())


# A dataset is a function (root, split, **options) -> (image folder, annotations).


def folder(root: str | Path, split: str, *, extra_roots: str | Sequence[str] = ()) -> Files:
    """Return the image folder and the annotations of a folder in a layout of LAYOUTS.

    extra_roots: see `build_detection_set`.
    """
    return open_layout(root, split, extra_roots)


def coco(
    root: str | Path,
    split: str,
    *,
    images: str = "{split}2017",
    annotations: str = "annotations/instances_{split}2017.json",
) -> Files:
    """Return the image folder and the annotation file of a dataset in COCO's format.

    root: folder of the dataset. split: "train" or "val". images, annotations: paths relative to
    `root`, in which {split} is replaced by the split.
    """
    images, annotations = (str(p).replace("{split}", split) for p in (images, annotations))
    file, layout, splits = Path(root, annotations), "", {}
    if not os.path.exists(file):
        with suppress(DataError):
            layout, splits = find_layout(root)
    if split in splits:
        raise DataError(
            f"there is no annotation file {file}, but {root} has the layout {layout}: set "
            "DATA.TRAIN and DATA.TEST to folder"
        )
    return Path(root, images), file


def scenes(
    root: str | Path,
    split: str,
    *,
    seed: int = 0,
    train: int = NUM_TRAIN,
    val: int = NUM_VAL,
    low: int = 128,
    high: int = 192,
) -> Files:
    """Return the image folder and the annotation file of synthetic scenes of scanned digits.

    The scenes are rendered into a subfolder of `root` on first use. train, val: number of scenes in
    each split. low, high: minimum and maximum side in pixels.
    """
    folder = find_scenes(root, seed=seed, train=train, val=val, low=low, high=high)
    return folder / split, folder / f"annotations/instances_{split}.json"


DETECTION_SETS = {"folder": folder, "coco": coco, "scenes": scenes, "fake_boxes": fake_boxes}
SYNTHETIC_SETS = {"scenes", "fake_boxes"}  # datasets that are rendered below root


def build_detection_set(
    name: str,
    root: str | Path,
    split: str,
    transform: Transform | None = None,
    *,
    masks: bool,
    keep_empty: bool = False,
    extra_roots: Sequence[str] = (),
    quiet: bool = False,
    **own: object,
) -> CocoDataset:
    """Build one split, "train", "val" or "test", of the dataset `name`, a key of DETECTION_SETS.

    transform, masks, keep_empty, quiet: see `CocoDataset`. extra_roots: additional folders to which
    symbolic links in the image folder may point. own: additional arguments of the function
    DETECTION_SETS[name], such as paths.
    """
    locate = lookup(DETECTION_SETS, name, "detection set")
    lookup(SPLITS, split, "split")
    if "extra_roots" in keyword_only(locate):
        own["extra_roots"] = extra_roots
    images, annotations = locate(root, split, **own)
    options = dict(masks=masks, keep_empty=keep_empty, quiet=quiet)
    options["roots"] = join_roots(root, extra_roots)
    return CocoDataset(images, annotations, split, transform, **options)


def own_arguments(name: str) -> list[str]:
    """Return the names of the arguments of `build_detection_set` that DATA.KWARGS may set.

    These are `extra_roots`, and the keyword arguments of the function DETECTION_SETS[name].
    """
    own = keyword_only(lookup(DETECTION_SETS, name, "detection set"))
    return list(dict.fromkeys([*own, "extra_roots"]))
