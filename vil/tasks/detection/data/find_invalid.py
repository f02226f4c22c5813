"""Find what of an annotation file training would not use, and images that do not match it."""

import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vil.data.image import UnreadableImage, read_size
from vil.tasks.detection.data.coco_json import REASONS, Annotations, read_annotations
from vil.tasks.detection.data.datasets import missing_images
from vil.utils.errors import DataError

SHOWN = 12
AREAS = {"small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, float("inf"))}
MISSING, UNREADABLE = "is not in the folder", "cannot be opened"
# DATA.MAX_BAD_FRACTION, unless a config says otherwise: more unreadable pictures end a training.
FORGIVEN = 0.01


class Fault(NamedTuple):
    """Something that is wrong with an annotation, or with the image itself."""

    about: str
    image: str
    reason: str


class AnnotationCheck(NamedTuple):
    """summary: lines on what the file has. faults: all that is wrong."""

    table: Annotations
    summary: list[str]
    faults: list[Fault]

    def list_faults(self, *, hint: bool) -> list[str]:
        """Lines with the faults by kind, the first of each. hint: name the flag that lists all."""
        return list_faults(self.faults, hint)

    def raise_if_unusable(self) -> None:
        """Raise DataError if training would."""
        raise_if_unusable(self.table, self.faults)


def find_invalid(annotations: str | Path, images: str | Path | None = None) -> AnnotationCheck:
    """Check a file in COCO's format and, with `images`, the folder of its images."""
    table = read_annotations(annotations, masks=True)
    masks = bool(table.segmentations.usable.any())
    dropped = [Fault(f"annotation {d.annotation}", d.image, d.reason) for d in table.dropped()]
    faults = dropped if masks else [f for f in dropped if f.reason != no_mask()]
    faults += faults_of_images(table, Path(images)) if images else []
    return AnnotationCheck(table, summary(table, masks), faults)


def no_mask() -> str:
    """The reason that only matters to a detector that also draws masks."""
    return REASONS[-1]


def summary(table: Annotations, masks: bool) -> list[str]:
    """What the file has: images, boxes by category and size, masks."""
    good, crowds = boxes_of(table), table.crowd
    crowds, good = int((good & crowds).sum()), good & ~crowds
    used = len(np.unique(table.images[good]))
    areas = table.areas[good]
    sizes = {n: int(((low <= areas) & (areas < high)).sum()) for n, (low, high) in AREAS.items()}
    counts = np.bincount(table.labels[good], minlength=len(table.classes) + 1)[1:].tolist()
    names = [f"{name} ({count})" for name, count in zip(table.classes, counts)]
    fit = int((good & table.segmentations.usable).sum())
    empty = len(table.names) - used
    rows = {
        "images": f"{len(table.names)}, {empty} of them without a usable box",
        "boxes": f"{good.sum()} usable, {crowds} crowds (left out of training)",
        "by area": ", ".join(f"{name} {count}" for name, count in sizes.items()),
        "masks": f"{fit} of the usable boxes have one" if masks else "none: mask_rcnn needs them",
        "categories": f"{len(names)}: {', '.join(names)}",
    }
    return [str(table.path), *(line for row in rows.items() for line in wrap(*row))]


def wrap(name: str, text: str) -> list[str]:
    """A row of the summary, in as many lines as it takes."""
    return textwrap.wrap(f"{name:11} {text}", 100, subsequent_indent=" " * 12)


def boxes_of(table: Annotations) -> np.ndarray:
    """Which annotations (M,) have a usable box, with or without a mask, crowds among them."""
    return (table.reasons == 0) | (table.reasons == REASONS.index(no_mask()))


def faults_of_images(table: Annotations, folder: Path) -> list[Fault]:
    """Images that are missing, cannot be opened, or are of another size than the file says."""
    names = [table.name(at) for at in range(len(table.names))]
    missing = set(missing_images(folder, names))
    faults = [Fault("image", name, MISSING) for name in names if name in missing]
    for name, said in zip(names, table.sizes.tolist()):
        if name in missing:
            continue
        try:
            found = list(read_size(folder / name))
        except UnreadableImage as error:
            faults.append(Fault("image", name, f"{UNREADABLE} ({' '.join(str(error).split())})"))
            continue
        if found != said:
            sides = "{} x {} px in the file, {} x {} in the picture, which counts"
            faults.append(Fault("image", name, sides.format(*said, *found)))
    return faults


def kind_of(fault: Fault) -> str:
    """What faults are counted together."""
    reason = "of another size than the file says" if "px in the file" in fault.reason else None
    reason = reason or fault.reason.split(" (")[0]
    return f"images: {reason}" if fault.about == "image" else f"dropped annotations: {reason}"


def list_faults(faults: list[Fault], hint: bool) -> list[str]:
    """The faults by kind, with the first of each."""
    lines = []
    for name, count in Counter(map(kind_of, faults)).items():
        lines.append(f"{count} {name}")
        own = [fault for fault in faults if kind_of(fault) == name]
        lines += [f"  {f.about} {f.image}: {f.reason}" for f in own[:SHOWN]]
        if count > SHOWN:
            lines.append(f"  and {count - SHOWN} more" + (" (--list FILE)" if hint else ""))
    return lines or ["no faults"]


def raise_if_unusable(table: Annotations, faults: list[Fault]) -> None:
    """Raise DataError if training would."""
    if not (boxes_of(table) & ~table.crowd).any():
        raise DataError(f"{table.path} cannot be trained on: it has no usable box")
    if missing := sum(fault.reason == MISSING for fault in faults):
        raise DataError(f"{table.path} cannot be trained on: {missing} of its images are missing")
    broken = sum(fault.reason.startswith(UNREADABLE) for fault in faults)
    if broken > FORGIVEN * len(table.names):
        raise DataError(
            f"{table.path} cannot be trained on: {broken} of {len(table.names)} images cannot be "
            f"opened, more than the allowed fraction of {FORGIVEN} (DATA.MAX_BAD_FRACTION)"
        )
