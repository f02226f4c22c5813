"""Sets in COCO's format: pictures in a folder, boxes and masks in one JSON file.

Boxes are cut at the picture's border when it is read: of two sizes that differ, the picture's and
the file's, the picture's counts. What cannot be used is dropped when the file is read, counted, and
warned of once; `vil detect check` lists it.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from vil.data.dataset import SPLITS
from vil.data.image import read_image
from vil.data.synthetic.scenes import NUM_TRAIN, NUM_VAL, find_scenes
from vil.tasks.detection.data.batch import Target, collate
from vil.tasks.detection.data.coco_json import Annotations, read_annotations
from vil.tasks.detection.data.fake import write_fake
from vil.tasks.detection.data.transforms import clipped
from vil.utils.errors import DataError
from vil.utils.lookup import lookup

logger = logging.getLogger(__name__)

Transform = Callable[[Tensor, Target], tuple[Tensor, Target]]


class CocoDataset(Dataset):
    """ds[i] -> (image (3, H, W) uint8 RGB, target), with the targets of `batch.py`.

    Label l stands for `category_ids[l - 1]`, called `classes[l - 1]`; categories are in the order
    of their ids. Training leaves out pictures without a usable box, and crowds; evaluation has all
    pictures. A picture that cannot be read is an OSError, as in classification.
    """

    collate = staticmethod(collate)

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path,
        split: str,
        transform: Transform | None = None,
        *,
        masks: bool = False,
        keep_empty: bool = False,
    ):
        """keep_empty: train on pictures without a box too. DataError for a file that cannot be
        used, pictures that are not in the folder, and a training set without a usable box.
        """
        lookup(SPLITS, split, "split")
        self.folder, self.annotations = Path(images), Path(annotations)
        self.split, self.transform = split, transform
        table = read_annotations(annotations, masks=masks)
        self.classes, self.category_ids = table.classes, table.category_ids
        self.dropped = list(table.dropped())
        warn_of(table)
        self.segmentations = table.segmentations
        # the usable annotations by image: those of image i are rows[first[i]:first[i + 1]]
        rows = np.flatnonzero((table.reasons == 0) & ~table.crowd)
        if split == "train" and not len(rows):
            raise DataError(f"{annotations} has no usable box to train with{why_none(table)}")
        self.rows = rows[np.argsort(table.images[rows], kind="stable")]
        counts = np.bincount(table.images[rows], minlength=len(table.names))
        first = np.concatenate([[0], np.cumsum(counts)])
        kept = np.flatnonzero(counts) if split == "train" and not keep_empty else ...
        self.first, self.last = first[:-1][kept], first[1:][kept]
        self.boxes = table.boxes[self.rows]
        self.labels = table.labels[self.rows]
        self.names, self.image_ids = table.names[kept], table.image_ids[kept]
        wide = table.sizes[:, 0] >= table.sizes[:, 1]
        self.groups = wide[kept].astype(np.int64)  # (N,): 0 tall, 1 wide
        refuse_missing(self.folder, map(os.fsdecode, self.names.tolist()))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        image = F.pil_to_tensor(read_image(self.folder / self.sample_name(index)))
        target = self.target(index, *image.shape[-2:])
        if self.transform is not None:
            image, target = self.transform(image, target)
        return image, target

    def target(self, index: int, height: int, width: int) -> Target:
        """The target of a sample whose picture has this size."""
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
        return clipped(target, (height, width))

    def sample_name(self, index: int) -> str:
        """The path below the folder of pictures."""
        return os.fsdecode(self.names[index])


def refuse_missing(folder: Path, names: Iterable[str]) -> None:
    """DataError for pictures that are not there, five of them by name. Folders are listed: to ask
    for a hundred thousand files one by one takes minutes on a network disk."""
    missing = missing_images(folder, names)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        count = "1 image is" if len(missing) == 1 else f"{len(missing)} images are"
        raise DataError(f"{count} not in {folder}: {', '.join(missing[:5])}{more}")


def missing_images(folder: Path, names: Iterable[str]) -> list[str]:
    """The names below the folder that are not there, in their order. DataError for one that leads
    out of it: an annotation file from elsewhere may not choose what of this machine is read."""
    if not folder.is_dir():
        raise DataError(f"there is no folder of pictures {folder}")
    listed: dict[str, set[str]] = {}
    missing, inside = [], os.path.join(os.path.abspath(folder), "")
    for name in names:
        if not os.path.abspath(folder / name).startswith(inside):
            raise DataError(f"the file_name {name!r:.80} is none below the folder {folder}")
        parent, file = os.path.split(name)
        if parent not in listed:
            below = folder / parent
            listed[parent] = set(os.listdir(below)) if below.is_dir() else set()
        if file not in listed[parent]:
            missing.append(name)
    return missing


def warn_of(table: Annotations) -> None:
    """One line for all that is dropped."""
    if counts := table.counts():
        logger.warning(
            "%s: %d of %d annotations are dropped (%s); vil detect check lists them",
            table.path,
            sum(counts.values()),
            len(table.ids),
            ", ".join(f"{reason}: {count}" for reason, count in counts.items()),
        )


def why_none(table: Annotations) -> str:
    """What became of all annotations of a file."""
    if not len(table.ids):
        return ": it has no annotations"
    whole = {**table.counts(), "a crowd": int((table.crowd & (table.reasons == 0)).sum())}
    each = ", ".join(f"{reason}: {count}" for reason, count in whole.items() if count)
    return f", of {len(table.ids)} annotations ({each})"


def coco(
    root: str | Path,
    split: str,
    transform: Transform | None = None,
    *,
    masks: bool,
    keep_empty: bool,
    images: str = "{split}2017",
    annotations: str = "annotations/instances_{split}2017.json",
) -> CocoDataset:
    """COCO, or any set in its format: `images` and `annotations` are paths below root in which
    {split} is train or val."""
    folder, file = (
        Path(root, str(path).replace("{split}", split)) for path in (images, annotations)
    )
    return CocoDataset(folder, file, split, transform, masks=masks, keep_empty=keep_empty)


def scenes(
    root: str | Path,
    split: str,
    transform: Transform | None = None,
    *,
    masks: bool,
    keep_empty: bool,
    seed: int = 0,
    train: int = NUM_TRAIN,
    val: int = NUM_VAL,
    low: int = 128,
    high: int = 192,
) -> CocoDataset:
    """The embedded scenes of scanned digits, below root; written there at the first use."""
    lookup(SPLITS, split, "split")
    folder = find_scenes(root, seed=seed, train=train, val=val, low=low, high=high)
    return coco(
        folder,
        split,
        transform,
        masks=masks,
        keep_empty=keep_empty,
        images="{split}",
        annotations="annotations/instances_{split}.json",
    )


def fake_boxes(
    root: str | Path,
    split: str,
    transform: Transform | None = None,
    *,
    masks: bool,
    keep_empty: bool,
    n: int = 8,
    size: int = 128,
    height: int | None = None,
    num_classes: int = 3,
) -> CocoDataset:
    """Rectangles on noise, written below root each time: `size` wide, `height` (3/4 of it) high."""
    lookup(SPLITS, split, "split")
    folder = Path(root, "fake_boxes")
    try:
        write_fake(folder, split, n=n, size=size, height=height, num_classes=num_classes)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"made-up pictures cannot be written to {folder}: {reason}") from error
    return coco(
        folder,
        split,
        transform,
        masks=masks,
        keep_empty=keep_empty,
        images="{split}",
        annotations="annotations/instances_{split}.json",
    )


# Each row is called as f(root, split, transform, masks=, keep_empty=, **own).
DETECTION_SETS = {"coco": coco, "scenes": scenes, "fake_boxes": fake_boxes}
DRAWN = ("scenes", "fake_boxes")  # those that are written, below root
OF_ALL = ("masks", "keep_empty")


def build_detection_set(
    name: str,
    root: str | Path,
    split: str,
    transform: Transform | None = None,
    *,
    masks: bool,
    keep_empty: bool = False,
    **own: object,
) -> CocoDataset:
    """The `split` ("train" or "val") of a set of the table; `own` goes to it untouched."""
    row = lookup(DETECTION_SETS, name, "detection set")
    return row(root, split, transform, masks=masks, keep_empty=keep_empty, **own)


def own_arguments(name: str) -> list[str]:
    """What a detection set takes besides what all do."""
    row = lookup(DETECTION_SETS, name, "detection set")
    parameters = inspect.signature(row).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in OF_ALL]
