"""Divide the samples of a dataset into parts, such as folds, as a pure function of a seed.

The method is iterative stratification: K. Sechidis, G. Tsoumakas and I. Vlahavas, "On the
Stratification of Multi-Label Data", ECML PKDD 2011, section 3. Each part gets its share of every
label, and samples of one group stay together. scikit-learn's splitters are not used, because
another version may split differently and so mix training and test images of an existing run.

Shapes: N samples, K labels or numbers, P parts.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vil.data.dataset import ImageDataset
from vil.utils.console import printable
from vil.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

KINDS = {"column": "are in groups with", "content": "are identical to"}
MAX_LISTED = 5  # class names in a message
NUM_BINS = 10  # quantile bins per number, at most
MAX_COMPARED = 50_000  # images that "auto" reads to find identical ones


def assign_parts(
    targets: np.ndarray,
    fractions: Sequence[float],
    *,
    target_type: str = "class",
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Assign each of N samples to one of P parts. Returns the part numbers (N,) int64 in 0..P-1.

    If no group has more than one label, every part contains every label that occurs in at least P
    groups.

    targets, target_type: see `vil.data.dataset.ImageDataset`. fractions: (P,) fraction of the
    samples for each part, with sum 1. groups: (N,) int64, groups of samples that stay in one part.
    None: each sample is a group of its own.
    """
    count = len(targets)
    groups = np.arange(count) if groups is None else np.unique(groups, return_inverse=True)[1]
    groups = groups.reshape(-1)
    shares = np.asarray(fractions, np.float64)
    # not more bins than samples in the smallest part, because it gets at least one of each bin
    most = min(NUM_BINS, max(1, round(count * shares.min())))
    for num_bins in (most, 1):
        labels = sample_labels(targets, target_type, num_bins)
        parts = _assign_groups(groups, *labels, shares, seed)
        if target_type != "numbers" or len(np.unique(parts)) == len(shares):
            break
    return parts[groups]


def sample_labels(
    targets: np.ndarray, target_type: str, num_bins: int = NUM_BINS
) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs (sample, label) as two int64 arrays of equal length: the samples' indices,
    and the labels.

    For target_type "numbers", a sample has K labels, one for each of its K numbers. Each number has
    its own set of labels, which stand for its `num_bins` quantile bins.
    """
    count = len(targets)
    if target_type == "class":
        return np.arange(count), np.asarray(targets, np.int64)
    if target_type == "labels":
        samples, labels = np.nonzero(targets)
        return samples, labels
    columns = []
    for number, values in enumerate(np.asarray(targets, np.float64).T):
        # equal values have the same rank, so they are in the same bin
        ranks = np.searchsorted(np.sort(values, kind="stable"), values)
        columns.append(number * num_bins + ranks * num_bins // count)
    return np.tile(np.arange(count), len(columns)), np.concatenate(columns)


def _assign_groups(
    groups: np.ndarray, samples: np.ndarray, labels: np.ndarray, fractions: np.ndarray, seed: int
) -> np.ndarray:
    """Assign each of G groups to a part. Returns the part numbers (G,) int64. groups: (N,) group of
    each sample, numbered from 0. samples, labels: the two arrays that `sample_labels` returns."""
    num_groups, num_parts = int(groups.max()) + 1, len(fractions)
    sizes = np.bincount(groups, minlength=num_groups).tolist()
    order = np.random.RandomState(np.random.MT19937(seed)).permutation(num_groups)
    order = order[np.argsort([-sizes[group] for group in order], kind="stable")].tolist()
    labels_of, groups_of = _group_labels(groups[samples], labels, order, num_groups)
    wanted = (fractions * len(groups)).tolist()  # samples that each part still needs
    needs = {}  # samples of each label that each part still needs
    for label, members in groups_of.items():
        least = 1.0 if len(members) >= num_parts else 0.0
        total = sum(labels_of[group][label] for group in members)
        needs[label] = np.maximum(fractions * total, least).tolist()
    left = {label: len(members) for label, members in groups_of.items()}  # unassigned groups
    empty = {label: set(range(num_parts)) for label in groups_of}  # parts without the label
    parts = [-1] * num_groups

    def assign(group: int, need: Sequence[float], allowed: Sequence[int]) -> None:
        part = max(allowed, key=lambda p: (need[p], wanted[p], -p))
        parts[group] = part
        wanted[part] -= sizes[group]
        for label, number in labels_of[group].items():
            needs[label][part] -= number
            left[label] -= 1
            empty[label].discard(part)

    everywhere = range(num_parts)
    while any_left := [label for label, number in left.items() if number]:
        rarest = min(any_left, key=lambda label: (left[label], label))
        for group in groups_of[rarest]:
            if parts[group] < 0:
                # the last groups go to the parts that have none
                lacking = sorted(empty[rarest])
                is_last = lacking and left[rarest] <= len(lacking)
                assign(group, needs[rarest], lacking if is_last else everywhere)
    for group in order:
        if parts[group] < 0:  # without any label
            assign(group, wanted, everywhere)
    return np.array(parts, np.int64)


def _group_labels(
    groups: np.ndarray, labels: np.ndarray, order: Sequence[int], num_groups: int
) -> tuple[list[dict[int, int]], dict[int, list[int]]]:
    """Count the labels of each group. Returns (labels_of, groups_of).

    labels_of: for each group, {label: number of the group's samples with this label}.
    groups_of: {label: the groups with this label, in the order of `order`}.

    groups, labels: two arrays with one entry for each pair of a sample and one of its labels.
    order: a permutation of all groups.
    """
    labels_of: list[dict[int, int]] = [{} for _ in range(num_groups)]
    for group, label in zip(groups.tolist(), labels.tolist()):
        labels_of[group][label] = labels_of[group].get(label, 0) + 1
    groups_of: dict[int, list[int]] = {}
    for group in order:
        for label in labels_of[group]:
            groups_of.setdefault(label, []).append(group)
    return labels_of, groups_of


def join_groups(*keys: np.ndarray) -> np.ndarray:
    """Return the group (N,) int64 of each sample. Samples that share a key, directly or through
    other samples, are in one group.

    keys: arrays (N,) int64. A negative key equals no other key. A group's number is the index of
    its first sample.
    """
    parents = list(range(len(keys[0])))

    def first(sample: int) -> int:
        while parents[sample] != sample:
            parents[sample] = sample = parents[parents[sample]]
        return sample

    for column in keys:
        seen: dict[int, int] = {}
        for sample, key in enumerate(column.tolist()):
            if key >= 0:
                one, two = sorted((first(sample), first(seen.setdefault(key, sample))))
                parents[two] = one
    return np.array([first(sample) for sample in range(len(parents))], np.int64)


def number_keys(keys: Sequence[bytes | str | None]) -> np.ndarray:
    """Map keys to integers (N,) int64, hashes by which equal keys of any datasets are found. None
    gets -1."""

    def number(key: bytes | str | None) -> int:
        if key is None:
            return -1
        content = key.encode(errors="surrogatepass") if isinstance(key, str) else key
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1

    return np.array([number(key) for key in keys], np.int64)


class ShownClasses:
    """The classes that the images of a dataset show, by which images with boxes or masks are
    divided. targets (N, K) bool: the classes of each image."""

    target_type = "labels"
    split_groups = None

    def __init__(self, dataset: Any, targets: np.ndarray) -> None:
        self.targets, self.classes, self.content = targets, dataset.classes, dataset.content

    def __len__(self) -> int:
        return len(self.targets)


def group_samples(dataset: ImageDataset, group_by: str, name: str) -> np.ndarray:
    """Return the group number (N,) int64 of each sample.

    group_by: "column" groups by the dataset's `split_groups`, "content" groups identical images,
    "auto" combines both, and "none" makes no groups. "auto" compares no images if there are more
    than MAX_COMPARED. name: the dataset's name in messages. Raises ConfigError for "column" if the
    dataset has no groups.
    """
    count, keys = len(dataset), _sample_keys(dataset, group_by)
    if group_by == "column" and not keys:
        raise ConfigError(
            f"DATA.GROUP_BY is 'column', but {name} has no group column: use 'auto' or 'content'"
        )
    if group_by == "auto" and count > MAX_COMPARED:
        text = "%s has %d images. More than %d images are not compared, so identical images may be "
        text += "in different splits: to compare all images, set DATA.GROUP_BY to content"
        logger.warning(text, name, count, MAX_COMPARED)
    return join_groups(*keys.values()) if keys else np.arange(count)


def warn_shared(
    held_out: Mapping[str, ImageDataset], trained_on: Mapping[str, ImageDataset], group_by: str
) -> None:
    """Log a warning if held-out images of one dataset belong together with training images of
    another, because each dataset is divided by itself.

    held_out, trained_on: {name of a dataset: part of it}. group_by: see `group_samples`.
    """
    keys = {name: _sample_keys(dataset, group_by) for name, dataset in trained_on.items()}
    for name, dataset in held_out.items():
        for kind, values in _sample_keys(dataset, group_by).items():
            for other in sorted(keys.keys() - {name}):
                shared = np.isin(values, keys[other].get(kind, [])) & (values >= 0)
                if shared.any():
                    text = "%d of %d images that are held out of %s %s training images of %s: put "
                    text += "both into one data set, so that they are divided together"
                    logger.warning(text, shared.sum(), len(values), name, KINDS[kind], other)


def _sample_keys(dataset: ImageDataset, group_by: str) -> dict[str, np.ndarray]:
    """Return the integers by which images belong together, see `number_keys`: {key of KINDS: (N,)
    int64}. group_by: see `group_samples`."""
    keys, count = {}, len(dataset)
    if group_by in ("column", "auto") and dataset.split_groups is not None:
        keys["column"] = dataset.split_groups
    if group_by == "content" or (group_by == "auto" and count <= MAX_COMPARED):
        keys["content"] = number_keys([_content_hash(dataset, index) for index in range(count)])
    return keys


def _content_hash(dataset: ImageDataset, index: int) -> bytes | None:
    try:
        return hashlib.blake2b(dataset.content(index), digest_size=16).digest()
    except OSError:
        return None  # an unreadable image equals no other


def divide(
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
