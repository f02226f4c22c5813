"""Divide the training split of a dataset into training, validation and test images, according to
the config keys DATA.VAL_FRACTION, TEST_FRACTION and FOLDS."""

import logging
from collections.abc import Sequence

import numpy as np
from yacs.config import CfgNode

from vil.data.dataset import ImageDataset
from vil.data.image_groups import group_samples
from vil.data.splits import assign_parts, sample_labels
from vil.utils.console import printable
from vil.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

MAX_LISTED = 5  # class names in a message


def derived_splits(cfg: CfgNode, name: str) -> list[str]:
    """Return the parts, such as ["train", "val"], into which the training split of a dataset is
    divided.

    name: name of the dataset. Returns [] if the split is not divided. Raises ConfigError if the
    config holds out images that no dataset in DATA.VAL or DATA.TEST would use.
    """
    data = cfg.DATA
    if data.VAL:
        held_out = {
            "val": (data.VAL_FRACTION, "VAL"),
            "test": (data.FOLDS or data.TEST_FRACTION, "TEST"),
        }
    else:
        held_out = {"val": (data.FOLDS or data.VAL_FRACTION, "TEST")}
    splits = []
    for split, key in ((split, key) for split, (amount, key) in held_out.items() if amount):
        shared = set(data[key]) & set(data.TRAIN)
        if not shared:
            raise ConfigError(
                f"{split} images can only be held out from a dataset in both DATA.TRAIN "
                f"({', '.join(data.TRAIN)}) and DATA.{key} ({', '.join(data[key])}): change "
                f"DATA.{key}, or set DATA.VAL_FRACTION, TEST_FRACTION and FOLDS to 0"
            )
        if name in shared:
            splits.append(split)
    return ["train", *splits] if splits else []


def split_indices(cfg: CfgNode, name: str, dataset: ImageDataset) -> dict[str, np.ndarray]:
    """Divide the training split of the dataset `name`. Returns {split: sorted indices}.

    The test images are selected before the validation images, so they do not depend on
    DATA.VAL_FRACTION. Raises DataError if a class has too few groups of images for all splits.
    """
    data, splits = cfg.DATA, derived_splits(cfg, name)
    groups = group_samples(dataset, data.GROUP_BY, name)
    rest, indices = np.arange(len(dataset)), {}
    by_fold = "test" if data.VAL else "val"
    for split in (split for split in ("test", "val") if split in splits):
        key = f"{split.upper()}_FRACTION"
        if data.FOLDS and split == by_fold:
            fractions, held_out = [1 / data.FOLDS] * data.FOLDS, data.FOLD
            what = f"{name}, DATA.FOLDS {data.FOLDS}"
        else:
            fractions, held_out = [1 - data[key], data[key]], 1
            what = f"{name}, DATA.{key} {data[key]}"
        parts = _divide(dataset, rest, groups, fractions, data.SPLIT_SEED, what)
        indices[split], rest = rest[parts == held_out], rest[parts != held_out]
    indices["train"] = rest
    counts = ", ".join(f"{len(indices[split])} {split}" for split in splits)
    logger.info("%s: %d images are divided into %s", name, len(dataset), counts)
    return indices


def _divide(
    dataset: ImageDataset,
    samples: np.ndarray,
    groups: np.ndarray,
    fractions: Sequence[float],
    seed: int,
    what: str,
) -> np.ndarray:
    """Divide samples into parts. Returns the number of each sample's part, 0 to len(fractions) - 1.

    samples: indices of the samples to divide. groups (N,): group of each sample of the full
    dataset. The samples of a group get the same part. what: text with which error messages begin.
    """
    targets, groups = dataset.targets[samples], groups[samples]
    kind = dict(target_type=dataset.target_type)
    count = len(fractions)
    if (total := len(np.unique(groups))) < count:
        raise DataError(
            f"{what}: the images have only {total} groups, which cannot be divided into {count} "
            "parts: add images, or set DATA.GROUP_BY to 'none'"
        )
    if dataset.target_type != "numbers":
        _check_groups(dataset, targets, groups, count, what)
    parts = assign_parts(targets, fractions, groups=groups, seed=seed, **kind)
    if dataset.target_type == "class":
        _check_classes(dataset.classes, targets, parts, count, what)
    if empty := count - len(np.unique(parts)):
        raise DataError(
            f"{what}: {empty} of {count} parts have no images, because the images of each label "
            f"are divided separately, and {len(samples)} images are too few for this: add images"
        )
    return parts


def _check_groups(
    dataset: ImageDataset, targets: np.ndarray, groups: np.ndarray, least: int, what: str
) -> None:
    """Raise DataError if a class has images in fewer than `least` groups. If images can have
    several labels, log a warning instead.

    targets: targets of the images to divide. groups: number of each image's group. what: text with
    which messages begin.
    """
    classes, (rows, labels) = dataset.classes, sample_labels(targets, dataset.target_type)
    pairs = np.unique(np.stack([labels, groups[rows]]), axis=1)
    counts = np.bincount(pairs[0], minlength=len(classes))
    rare = np.flatnonzero((counts < least) & (counts > 0)).tolist()
    if not rare:
        return
    named = (f"{classes[number]} {counts[number]}" for number in rare[:MAX_LISTED])
    shown = printable(", ".join(named))
    problem = (
        f"{what}: {len(rare)} of {len(classes)} classes have fewer than {least} images (or groups "
        f"of images that must be in one split): {shown}"
    )
    if dataset.target_type == "class":
        raise DataError(f"{problem}; add images, or remove these classes")
    logger.warning("%s; a class cannot be evaluated on a split that has no images of it", problem)


def _check_classes(
    classes: Sequence[str], targets: np.ndarray, parts: np.ndarray, count: int, what: str
) -> None:
    """Raise DataError if a class has no images in one of the `count` parts. parts: the part of each
    image. what: text with which error messages begin."""
    for part in range(count):
        missing = np.setdiff1d(targets, targets[parts == part]).tolist()
        if missing:
            shown = printable(", ".join(classes[number] for number in missing[:MAX_LISTED]))
            raise DataError(
                f"{what}: part {part} has no images of {len(missing)} of {len(classes)} classes "
                f"({shown}), because groups with images of several classes are not divided: change "
                "DATA.SPLIT_SEED, or set DATA.GROUP_BY to 'none'"
            )
