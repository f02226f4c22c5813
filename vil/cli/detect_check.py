"""What is in an annotation file in COCO's format, and what of it training would not use.

  vil detect check /data/coco/annotations/instances_train2017.json
  vil detect check mine/train.json --images mine/train
  vil detect check mine/train.json --images mine/train --list faults.tsv

Twelve faults of each kind are shown; --list writes all, one per line: what it is about, TAB, image,
TAB, reason. With --images the folder is searched for the images, and the head of each is read for
its size. Faults that training survives, by leaving an annotation or a picture out, are not errors:
exit code 0. 3 says that the file cannot be trained on.
"""

import argparse
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vil.cli.output import output_file, written

if TYPE_CHECKING:
    import numpy as np

    from vil.tasks.detection.data.coco_json import Annotations

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("annotations", metavar="ANNOTATIONS", help="the JSON file")
    add("--images", metavar="DIR", help="the folder of its images: is each there, of that size?")
    add("--list", metavar="FILE", help="write all faults, one per line")


def run(args: argparse.Namespace) -> int:
    from vil.tasks.detection.data.coco_json import read_annotations

    file = output_file(args.list, "--list") if args.list else None
    table = read_annotations(args.annotations, masks=True)
    masks = bool(table.segmentations.usable.any())
    about = [Fault(f"annotation {d.annotation}", d.image, d.reason) for d in table.dropped()]
    faults = about if masks else [f for f in about if f.reason != no_mask()]
    faults += faults_of_images(table, Path(args.images)) if args.images else []
    print("\n".join([*summary(table, masks), *listed(faults, args.list)]))
    if file:
        with written(file, "--list"):
            file.write_text("".join("\t".join(f) + "\n" for f in faults), "utf-8", "replace")
    refuse(table, faults)
    return 0


def no_mask() -> str:
    """The reason that only matters to a detector that also draws masks."""
    from vil.tasks.detection.data.coco_json import REASONS

    return REASONS[-1]


def summary(table: "Annotations", masks: bool) -> list[str]:
    """What the file has: images, boxes by category and size, masks."""
    import numpy as np

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
    return [str(table.path), *(line for row in rows.items() for line in told(*row))]


def told(name: str, text: str) -> list[str]:
    """A row of the summary, in as many lines as it takes."""
    return textwrap.wrap(f"{name:11} {text}", 100, subsequent_indent=" " * 12)


def boxes_of(table: "Annotations") -> "np.ndarray":
    """Which annotations (M,) have a usable box, with or without a mask, crowds among them."""
    from vil.tasks.detection.data.coco_json import REASONS

    return (table.reasons == 0) | (table.reasons == REASONS.index(no_mask()))


def faults_of_images(table: "Annotations", folder: Path) -> list[Fault]:
    """Images that are missing, cannot be opened, or are of another size than the file says."""
    from vil.data.image import UnreadableImage, read_size
    from vil.tasks.detection.data.datasets import missing_images

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


def kind(fault: Fault) -> str:
    """What faults are counted together."""
    reason = "of another size than the file says" if "px in the file" in fault.reason else None
    reason = reason or fault.reason.split(" (")[0]
    return f"images: {reason}" if fault.about == "image" else f"dropped annotations: {reason}"


def listed(faults: list[Fault], file: str | None) -> list[str]:
    """The faults by kind, with the first of each."""
    lines = []
    for name, count in Counter(map(kind, faults)).items():
        lines.append(f"{count} {name}")
        own = [fault for fault in faults if kind(fault) == name]
        lines += [f"  {f.about} {f.image}: {f.reason}" for f in own[:SHOWN]]
        if count > SHOWN:
            lines.append(f"  and {count - SHOWN} more" + ("" if file else " (--list FILE)"))
    return lines or ["no faults"]


def refuse(table: "Annotations", faults: list[Fault]) -> None:
    """DataError, if training would end with one."""
    from vil.utils.errors import DataError

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
