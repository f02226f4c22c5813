"""Find invalid annotations, and images that do not match their annotation file."""

import os
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vil.data.image import UnreadableImage, read_size
from vil.tasks.detection.data.coco_json import (
    REASONS,
    Annotations,
    AnnotationSource,
    Fault,
    read_annotations,
    to_source,
)
from vil.tasks.detection.data.datasets import missing_images
from vil.tasks.detection.data.layouts import LAYOUTS, find_layout
from vil.tasks.detection.data.misfits import Misfit, compare_sizes, find_misfits
from vil.utils.errors import DataError
from vil.utils.plural import plural

SHOWN = 12  # number of faults listed per kind
AREAS = {"small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, float("inf"))}
MISSING, UNREADABLE = "is not in the folder", "cannot be opened"
WRONG_SIZE = "{} x {} px in the file, but {} x {} px in the image; the image's size is used"
NO_MASKS = "none: mask_rcnn needs them"
NO_MASK = REASONS[-1]  # a fault only for detectors with masks
MAX_BAD_FRACTION = 0.01  # default of DATA.MAX_BAD_FRACTION: training stops above it


class AnnotationCheck(NamedTuple):
    """Result of `find_invalid`, with the invalid annotations and images of a dataset.

    table: content of the annotation file. summary: lines of text that describe this content.
    faults: list of all invalid annotations and images. misfits: ways in which annotations do not
    fit their images. notes: lines about the conversion from another format.
    """

    table: Annotations
    summary: list[str]
    faults: list[Fault]
    misfits: list[Misfit]
    notes: Sequence[str] = ()

    def list_faults(self, *, hint: bool) -> list[str]:
        """Return lines of text that list the faults by reason, at most SHOWN for each reason.

        hint: whether to mention the flag --list where faults are omitted. This flag writes all
        faults to a file.
        """
        lines, kinds = [], defaultdict(list)
        for fault in self.faults:
            kinds[kind_of(fault)].append(f"  {fault.about} {fault.image}: {fault.reason}")
        for kind, faults in kinds.items():
            noun, _, reason = kind.partition(": ")
            lines += [f"{plural(len(faults), noun)}: {reason}", *faults[:SHOWN]]
            if len(faults) > SHOWN:
                lines.append(f"  and {len(faults) - SHOWN} more" + (" (--list FILE)" * hint))
        hints = [misfit for misfit in self.misfits if misfit.hint]
        lines += [f"warning: {text}" for text in (*self.notes, *hints)]
        return lines or ["no faults"]

    def raise_if_unusable(self, split: str = "train") -> None:
        """Raise DataError if the dataset cannot be used for training.

        A training set must have at least one usable box. Of its boxes, and of its images, at most
        the fraction `misfits.MAX_SHARE` may not fit. In any split, no image may be missing, and the
        fraction of unreadable images may be at most MAX_BAD_FRACTION.
        """
        table, path = self.table, self.table.path
        is_train = split == "train"
        if is_train and not (has_box(table) & ~table.crowd).any():
            raise DataError(f"{path} cannot be used for training: it has no usable box")
        for misfit in self.misfits if is_train else ():
            if misfit.is_common and not misfit.of_masks:
                raise DataError(f"{path} cannot be used for training: {misfit}")
        if missing := sum(fault.reason == MISSING for fault in self.faults):
            images = plural(missing, "image is", "images are")
            raise DataError(f"{path} cannot be used for training: {images} missing")
        unreadable = sum(fault.reason.startswith(UNREADABLE) for fault in self.faults)
        if unreadable > MAX_BAD_FRACTION * len(table.names):
            raise DataError(
                f"{path} cannot be used for training: {unreadable} of {len(table.names)} images "
                f"cannot be opened, but by default at most {MAX_BAD_FRACTION:.0%} may fail "
                "(DATA.MAX_BAD_FRACTION): repair or remove these images"
            )


def kind_of(fault: Fault) -> str:
    """Return the heading under which a fault is listed, with a noun for one of them, such as
    "image: is not in the folder"."""
    if "px in the file" in fault.reason:
        return "image: of another size than the file says"
    dropped = "dropped annotation" if fault.reason in REASONS else "annotation"
    group = "image" if fault.about == "image" else dropped
    return f"{group}: {fault.reason.split(' (')[0]}"


def find_invalid_in_folder(root: str | Path) -> dict[str, AnnotationCheck]:
    """Find the invalid annotations and images of the dataset in a folder, whose layout is one of
    LAYOUTS, and return {split: result}. Raises DataError if the folder has no known layout."""
    name, splits = find_layout(root, [os.sep])
    files = {split: LAYOUTS[name].read(Path(root), at, [os.sep]) for split, at in splits.items()}
    return {split: find_invalid(source, images) for split, (images, source) in files.items()}


def find_invalid(
    annotations: str | Path | AnnotationSource, images: str | Path | None = None
) -> AnnotationCheck:
    """Find the invalid annotations and images of a dataset in COCO's format.

    annotations: annotation file or `AnnotationSource`. images: image folder, to find the images
    that are missing, unreadable or of an unexpected size; None: check only the annotations.
    """
    table = read_annotations(annotations, masks=True)
    masks = bool(table.segmentations.given.any())
    faults = [fault for fault in table.dropped if masks or fault.reason != NO_MASK]
    misfits = find_misfits(table)
    for misfit in misfits:
        if misfit.about == "images":
            names = map(os.fsdecode, table.names[misfit.rows].tolist())
            faults += [Fault("image", name, misfit.reason) for name in names]
            continue
        rows = misfit.rows[table.reasons[misfit.rows] == 0].tolist()
        faults += [Fault(*table.describe(row), misfit.reason) for row in rows]
    if images:
        invalid, other_sizes = find_invalid_images(table, Path(images))
        faults += invalid
        misfits += other_sizes
    notes = to_source(annotations).notes
    return AnnotationCheck(table, summarize(table, masks), faults, misfits, notes)


def has_box(table: Annotations) -> np.ndarray:
    """Return whether each of M annotations has a usable box, (M,) bool.

    The box of a crowd annotation or of an annotation without a mask can be usable too.
    """
    return (table.reasons == 0) | (table.reasons == REASONS.index(NO_MASK))


def summarize(table: Annotations, masks: bool) -> list[str]:
    """Return lines of text with the numbers of images, boxes and masks in an annotation file.

    Boxes are also counted by area and by category. masks: whether any annotation has a
    segmentation.
    """
    crowds = int((has_box(table) & table.crowd).sum())
    good = has_box(table) & ~table.crowd
    areas = table.areas[good]
    sizes = {n: int(((low <= areas) & (areas < high)).sum()) for n, (low, high) in AREAS.items()}
    counts = np.bincount(table.labels[good], minlength=len(table.classes) + 1)[1:].tolist()
    names = [f"{name} ({count})" for name, count in zip(table.classes, counts)]
    with_mask = int((good & table.segmentations.usable).sum())
    rows = {
        "images": f"{len(table.names)}, {table.count_empty(good)} of them without a usable box",
        "boxes": f"{good.sum()} usable, {plural(crowds, 'crowd')} (left out of training)",
        "by area": ", ".join(f"{name} {count}" for name, count in sizes.items()),
        "masks": f"{with_mask} of the usable boxes have one" if masks else NO_MASKS,
        "categories": f"{len(names)}: {', '.join(names)}",
    }
    if empty_names := [name for name, count in zip(table.classes, counts) if not count]:
        rows["no objects"] = f"{', '.join(empty_names)}: such a category is kept, AP leaves it out"
    lines = [str(table.path)]
    for name, text in rows.items():
        lines += textwrap.wrap(f"{name:11} {text}", 100, subsequent_indent=" " * 12)
    return lines


def find_invalid_images(table: Annotations, folder: Path) -> tuple[list[Fault], list[Misfit]]:
    """Return a fault for each image that is missing, unreadable, or of an unexpected size.

    The second result says whether images have another size than the file says.
    This check follows symbolic links to any folder. Training is stricter: it follows only links to
    the folders in DATA.PATH and DATA.KWARGS.extra_roots.
    """
    names = [os.fsdecode(name) for name in table.names.tolist()]
    missing = set(missing_images(folder, names, roots=[os.sep]))
    faults = [Fault("image", name, MISSING) for name in names if name in missing]
    opened, sizes = [], []
    for index, (name, expected) in enumerate(zip(names, table.sizes.tolist())):
        if name in missing:
            continue
        try:
            size = list(read_size(folder / name))
        except UnreadableImage as error:
            faults.append(Fault("image", name, f"{UNREADABLE} ({' '.join(str(error).split())})"))
            continue
        opened.append(index)
        sizes.append(size)
        if size != expected:
            faults.append(Fault("image", name, WRONG_SIZE.format(*expected, *size)))
    sizes = np.array(sizes, np.int64).reshape(-1, 2)
    return faults, compare_sizes([names[i] for i in opened], table.sizes[opened], sizes)
