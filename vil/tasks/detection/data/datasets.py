"""Datasets in COCO's format: a folder of images, and a JSON file with boxes and masks.

Boxes are clipped to the image when it is read, in case its size differs from the file's. Unusable
annotations are dropped when the file is read, with one warning; `vil detect check` lists them.
"""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from vil.data import keyword_only
from vil.data.dataset import SPLITS
from vil.data.image import read_image
from vil.data.synthetic.scenes import NUM_TRAIN, NUM_VAL, find_scenes
from vil.tasks.detection.data.batch import Target, collate
from vil.tasks.detection.data.coco_json import Annotations, read_annotations
from vil.tasks.detection.data.fake import Files, fake_boxes
from vil.tasks.detection.data.transforms import clip_boxes
from vil.utils.errors import DataError
from vil.utils.lookup import lookup

logger = logging.getLogger(__name__)

Transform = Callable[[Tensor, Target], tuple[Tensor, Target]]


class CocoDataset(Dataset):
    """ds[i] -> (image (3, H, W) uint8 RGB, target), see `DetectionBatch` for targets.

    Label l is `category_ids[l - 1]`, named `classes[l - 1]`; categories are sorted by id. Training
    skips crowds, and images without a usable box; evaluation has all images. An unreadable image
    raises UnreadableImage.
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
        """keep_empty: also train on images without a box. Raises DataError for an invalid file,
        missing images, and a training set without a usable box."""
        lookup(SPLITS, split, "split")
        self.folder, self.annotations = Path(images), Path(annotations)
        self.split, self.transform = split, transform
        table = read_annotations(annotations, masks=masks)
        self.classes, self.category_ids = table.classes, table.category_ids
        self.dropped = table.dropped
        if table.dropped:
            counts = format_counts(table.count_dropped())
            logger.warning(
                f"{table.path}: {len(table.dropped)} of {len(table.reasons)} annotations are "
                f"dropped ({counts}); vil detect check lists them"
            )
        self.segmentations = table.segmentations
        # the usable annotations by image: those of image i are rows[first[i]:last[i]]
        rows = np.flatnonzero((table.reasons == 0) & ~table.crowd)
        if split == "train" and not len(rows):
            raise DataError(f"{annotations} has no usable box to train with{explain_none(table)}")
        self.rows = rows[np.argsort(table.images[rows], kind="stable")]
        counts = np.bincount(table.images[rows], minlength=len(table.names))
        last = np.cumsum(counts)
        kept = np.flatnonzero(counts) if split == "train" and not keep_empty else ...
        self.first, self.last = (last - counts)[kept], last[kept]
        self.boxes, self.labels = table.boxes[self.rows], table.labels[self.rows]
        self.names, self.image_ids = table.names[kept], table.image_ids[kept]
        wide = table.sizes[:, 0] >= table.sizes[:, 1]
        self.groups = wide[kept].astype(np.int64)  # (N,): 0 tall, 1 wide
        if missing := missing_images(self.folder, map(os.fsdecode, self.names.tolist())):
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            count = "1 image is" if len(missing) == 1 else f"{len(missing)} images are"
            raise DataError(f"{count} not in {self.folder}: {', '.join(missing[:5])}{more}")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        image = F.pil_to_tensor(read_image(self.folder / self.sample_name(index)))
        target = self.target(index, *image.shape[-2:])
        if self.transform is not None:
            image, target = self.transform(image, target)
        return image, target

    def target(self, index: int, height: int, width: int) -> Target:
        """Return the target of a sample, for the size of its image."""
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

    def sample_name(self, index: int) -> str:
        """Return the image's path relative to the folder."""
        return os.fsdecode(self.names[index])


def missing_images(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the names that are not in the folder.

    Lists folders: a query per file takes minutes for COCO on a network disk. Raises DataError for a
    path outside of the folder: an annotation file must not select other files of this machine.
    """
    if not folder.is_dir():
        raise DataError(f"there is no image folder {folder}")
    listed: dict[str, set[str]] = {}
    missing, inside = [], os.path.join(os.path.abspath(folder), "")
    for name in names:
        if not os.path.abspath(folder / name).startswith(inside):
            raise DataError(f"the file_name {name!r:.80} is not inside of the folder {folder}")
        parent, file = os.path.split(name)
        if parent not in listed:
            below = folder / parent
            listed[parent] = set(os.listdir(below)) if below.is_dir() else set()
        if file not in listed[parent]:
            missing.append(name)
    return missing


def explain_none(table: Annotations) -> str:
    """Explain why a file has no usable box."""
    if not len(table.reasons):
        return ": it has no annotations"
    crowds = int((table.crowd & (table.reasons == 0)).sum())
    counts = table.count_dropped() | ({"a crowd": crowds} if crowds else {})
    return f", of {len(table.reasons)} annotations ({format_counts(counts)})"


def format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in counts.items())


# Each dataset is a function (root, split, **own) -> the image folder, the annotation file.


def coco(
    root: str | Path,
    split: str,
    *,
    images: str = "{split}2017",
    annotations: str = "annotations/instances_{split}2017.json",
) -> Files:
    """COCO, or any dataset in its format, by paths below root with a {split}: train or val."""
    folder, file = (str(path).replace("{split}", split) for path in (images, annotations))
    return Path(root, folder), Path(root, file)


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
    """Scenes of scanned digits, rendered below root on first use."""
    folder = find_scenes(root, seed=seed, train=train, val=val, low=low, high=high)
    return folder / split, folder / f"annotations/instances_{split}.json"


DETECTION_SETS = {"coco": coco, "scenes": scenes, "fake_boxes": fake_boxes}
SYNTHETIC_SETS = {"scenes", "fake_boxes"}  # rendered below root


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
    """Build the `split` ("train" or "val") of a dataset with its own arguments."""
    locate = lookup(DETECTION_SETS, name, "detection set")
    lookup(SPLITS, split, "split")
    folder, file = locate(root, split, **own)
    return CocoDataset(folder, file, split, transform, masks=masks, keep_empty=keep_empty)


def own_arguments(name: str) -> list[str]:
    """Return the arguments that a dataset takes besides root and split."""
    return keyword_only(lookup(DETECTION_SETS, name, "detection set"))
