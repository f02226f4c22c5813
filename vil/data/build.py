"""Build the data loaders of a config, divide its datasets, and check their settings.

This code is common to all tasks. Each task passes a function that opens its datasets.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from yacs.config import CfgNode

from vil.data import EXTRAS, file_suffix
from vil.data.dataset import ImageDataset, LoadableDataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.splits import divide, group_samples
from vil.data.workers import count_workers
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.extras import require_extra
from vil.utils.lookup import lookup
from vil.utils.machine import gigabytes, total_bytes
from vil.utils.plural import plural

if TYPE_CHECKING:
    from vil.engine.distributed import DistInfo

logger = logging.getLogger(__name__)

REPEATS = 3  # augmented copies of an image in repeated augmentation, as in DeiT
# {type of the targets: by what a set is divided, in a message}
DIVIDED_BY = {"class": "class", "labels": "label", "numbers": "range of a number"}
FILES_PER_WORKER = 15  # for its process, its queue, and the tensors of two prefetched batches
FILES_PER_IDLE_WORKER = 5  # for its process and its queue


@dataclass(frozen=True)
class DataSettings:
    """The settings of a config for datasets and loaders, see `read_settings`.

    Unless a comment names another key, a field is named after its key in the section DATA.
    """

    task: str  # TASK
    image_size: int  # INPUT.IMAGE_SIZE
    channels: int  # INPUT.CHANNELS
    background: Sequence[int]  # INPUT.BACKGROUND
    batch_size: int  # DATALOADER.BSZ, of all ranks together
    accumulate: int  # OPTIM.ACCUMULATE
    workers: int  # DATALOADER.WORKERS
    balanced: bool  # DATALOADER.SAMPLER
    repeats: int  # AUG.REPEATED_AUG
    seed: int  # SEED
    path: str
    train: Sequence[str]
    val: Sequence[str]
    test: Sequence[str]
    kwargs: Mapping[str, Any]
    num_classes: int | str
    classes: str
    targetmap: str
    value_range: Sequence[float]
    max_bad_fraction: float
    val_fraction: float
    test_fraction: float
    folds: int
    fold: int
    split_seed: int
    group_by: str

    @as_config_error
    def train_loader(
        self,
        dist: DistInfo,
        device: torch.device,
        open_dataset: Callable[[], LoadableDataset],
        bad_file: Path | None = None,
    ) -> TrainLoader:
        """Build this rank's training loader, which yields one batch per optimizer step.

        The batches of all ranks together have DATALOADER.BSZ * OPTIM.ACCUMULATE samples.
        open_dataset: function that returns the training set. bad_file: text file to which the names
        of unreadable images are appended.
        """
        size, needed = self.batch_size, self.batch_size * self.accumulate
        if size % dist.world:
            near = max(size // dist.world, 1) * dist.world
            raise ConfigError(
                f"DATALOADER.BSZ {size} is not divisible by the number of processes, {dist.world}: "
                f"set DATALOADER.BSZ to {near}, for example"
            )
        dataset = open_dataset()
        if len(dataset) < needed:
            raise ConfigError(
                f"a step takes DATALOADER.BSZ {size} x OPTIM.ACCUMULATE {self.accumulate} "
                f"= {needed} images, but the training set has {len(dataset)}: lower one of the two "
                "keys"
            )
        if self.balanced and getattr(dataset, "target_type", None) != "class":
            raise ConfigError(
                "DATALOADER.SAMPLER 'balanced' needs a dataset with one class per image: use "
                "'random'"
            )
        return TrainLoader(
            dataset,
            batch_size=needed // dist.world,
            seed=self.seed,
            repeats=self.repeats,
            balanced=self.balanced,
            **self._loader_options(dist, device, bad_file),
        )

    @as_config_error
    def test_loaders(
        self,
        dist: DistInfo,
        device: torch.device,
        open_dataset: Callable[[str], LoadableDataset],
        bad_file: Path | None = None,
        datasets: Mapping[str, LoadableDataset] | None = None,
        *,
        max_batch: int | None = None,
        key: str = "TEST",
    ) -> dict[str, EvalLoader]:
        """Build {name: loader} for the test sets. Each loader yields this rank's share of the
        images.

        bad_file: text file to which the names of unreadable images are appended.
        datasets: {name: dataset}. By default, `open_dataset` is called with each name in DATA.TEST,
        or in DATA.VAL if `key` is "VAL".
        max_batch: if given, the batch size of a rank is min(max_batch, DATALOADER.BSZ). By default,
        the ranks divide DATALOADER.BSZ among them.
        """
        if datasets is None:
            names = self.val if key == "VAL" else self.test
            if len(set(names)) < len(names):
                raise ConfigError(f"DATA.{key} names a dataset twice: {', '.join(names)}")
            datasets = {name: open_dataset(name) for name in names}
        options = self._loader_options(dist, device, bad_file)
        size = self.batch_size
        options["batch_size"] = min(size, max_batch) if max_batch else -(-size // dist.world)
        return {name: EvalLoader(dataset, **options) for name, dataset in datasets.items()}

    def _loader_options(
        self, dist: DistInfo, device: torch.device, bad_file: Path | None
    ) -> dict[str, Any]:
        """Return the common arguments of the loaders. Raises ConfigError if a batch of float32
        images exceeds this machine's memory."""
        side, limit = self.image_size, total_bytes()
        size = -(-self.batch_size // dist.world) * self.channels * side**2 * 4
        if size > limit:
            raise ConfigError(
                f"DATALOADER.BSZ {self.batch_size} and INPUT.IMAGE_SIZE {side}: a batch takes "
                f"{gigabytes(size)}, more than the {gigabytes(limit)} of memory of this machine: "
                "lower one of the two keys"
            )
        workers = count_workers(self.workers, device, dist.local_ranks)
        check_open_files(workers, len(self.val) + len(self.test))
        return dict(
            rank=dist.rank,
            world=dist.world,
            bad_file=bad_file,
            workers=workers,
            pin_memory=device.type == "cuda",
            max_bad_fraction=self.max_bad_fraction,
        )

    def check_arguments(self, arguments_of: Callable[[str], list[str]]) -> None:
        """Raise ConfigError if DATA.KWARGS has a key that no dataset of the config accepts.

        arguments_of: function that returns the argument names that the dataset of a given name
        accepts.
        """
        sets = list(dict.fromkeys([*self.train, *self.val, *self.test]))
        names = ", ".join(sets)
        known = {argument: name for name in sets for argument in arguments_of(name)}
        for argument in self.kwargs:
            if not known:
                why = f"{names} takes no arguments: leave DATA.KWARGS empty"
                raise ConfigError(f"DATA.KWARGS.{argument}: {why}")
            lookup(known, argument, f"argument (DATA.KWARGS) of {names}")

    @contextmanager
    def arguments(self, name: str, taken: list[str]) -> Iterator[dict[str, Any]]:
        """Context manager that yields the items of DATA.KWARGS that the dataset `name` accepts, as
        a dict.

        Build the dataset inside the `with` block, so that a TypeError is raised as a ConfigError.
        taken: names of the arguments that the dataset accepts.
        """
        try:
            yield {key: value for key, value in self.kwargs.items() if key in taken}
        except TypeError as error:
            text = f"the dataset {name} cannot be built with DATA.KWARGS {self.kwargs}"
            raise ConfigError(f"{text}: {error}") from error

    @cached_property
    def divided(self) -> dict[str, list[str]]:
        """The datasets whose training split is divided: {name: parts, such as ["train", "val"]}.

        Raises ConfigError if the config holds out images that no dataset in DATA.VAL or DATA.TEST
        would use.
        """
        if self.val:
            held_out = {
                "val": (self.val_fraction, "VAL"),
                "test": (self.folds or self.test_fraction, "TEST"),
            }
        else:
            held_out = {"val": (self.folds or self.val_fraction, "TEST")}
        parts: dict[str, list[str]] = {}
        for split, key in ((split, key) for split, (amount, key) in held_out.items() if amount):
            names = self.val if key == "VAL" else self.test
            shared = set(names) & set(self.train)
            if not shared:
                raise ConfigError(
                    f"{split} images can only be held out from a dataset in both DATA.TRAIN "
                    f"({', '.join(self.train)}) and DATA.{key} ({', '.join(names)}): change "
                    f"DATA.{key}, or set DATA.VAL_FRACTION, TEST_FRACTION and FOLDS to 0"
                )
            for name in shared:
                parts.setdefault(name, ["train"]).append(split)
        return parts

    @property
    def is_counting(self) -> bool:
        """Whether the datasets are opened only to count the classes, and a second time later. Then,
        warnings are logged the second time only."""
        return self.num_classes == "auto"

    def split_indices(self, name: str, dataset: ImageDataset) -> dict[str, np.ndarray]:
        """Divide the training split of the dataset `name`. Returns {split: sorted indices}.

        The test images are selected before the validation images, so they do not depend on
        DATA.VAL_FRACTION. Raises DataError if a class has too few groups of images for all splits.
        """
        splits = self.divided[name]
        groups = group_samples(dataset, self.group_by, name)
        is_used = dataset.split_groups is not None and self.group_by in ("column", "auto")
        if is_used and not self.is_counting:
            text = "%s: the column or field of groups is used: images of a group stay in one split"
            logger.warning(text, name)
        rest, indices = np.arange(len(dataset)), {}
        by_fold = "test" if self.val else "val"
        held_out = {"test": self.test_fraction, "val": self.val_fraction}
        for split, fraction in held_out.items():
            if split not in splits:
                continue
            if self.folds and split == by_fold:
                fractions, selected = [1 / self.folds] * self.folds, self.fold
                what = f"{name}, DATA.FOLDS {self.folds}"
            else:
                fractions, selected = [1 - fraction, fraction], 1
                what = f"{name}, DATA.{split.upper()}_FRACTION {fraction}"
            parts = divide(dataset, rest, groups, fractions, self.split_seed, what)
            if not self.is_counting:
                share = float(np.mean(parts == selected))
                by = DIVIDED_BY[dataset.target_type]
                _warn_share(share, fractions[selected], groups[rest], what, by)
            indices[split], rest = rest[parts == selected], rest[parts != selected]
        indices["train"] = rest
        counts = ", ".join(f"{len(indices[split])} {split}" for split in splits)
        images = plural(len(dataset), "image is", "images are")
        logger.info("%s: %s divided into %s", name, images, counts)
        return indices


def _warn_share(
    share: float, wanted: float, groups: np.ndarray, what: str, divided_by: str
) -> None:
    """Log a warning if the held-out share of the images differs from the wanted one by more than 5
    percentage points and more than one image. groups (N,): group of each image. what: text with
    which the message begins. divided_by: a value of DIVIDED_BY."""
    if abs(share - wanted) <= max(0.05, 1 / len(groups)):
        return
    largest = np.unique(groups, return_counts=True)[1].max()
    why = f"each {divided_by} needs an image in each part"
    if largest > 1:
        why = f"groups of up to {largest} images are not divided (DATA.GROUP_BY)"
    text = "%s: %.0f %% of the images are held out instead of %.0f %%, because %s"
    logger.warning(text, what, 100 * share, 100 * wanted, why)


def read_settings(cfg: CfgNode) -> DataSettings:
    """Read the settings of datasets and loaders from a config."""
    settings = dict(
        task=cfg.TASK,
        image_size=cfg.INPUT.IMAGE_SIZE,
        channels=cfg.INPUT.CHANNELS,
        background=cfg.INPUT.BACKGROUND,
        batch_size=cfg.DATALOADER.BSZ,
        accumulate=cfg.OPTIM.ACCUMULATE,
        workers=cfg.DATALOADER.WORKERS,
        balanced=cfg.DATALOADER.SAMPLER == "balanced",
        repeats=REPEATS if cfg.AUG.REPEATED_AUG else 1,
        seed=cfg.SEED,
        kwargs=dict(cfg.DATA.KWARGS),
    )
    rest = {field.name for field in fields(DataSettings)} - settings.keys()
    return DataSettings(**settings, **{name: cfg.DATA[name.upper()] for name in rest})


def read_options(cfg: CfgNode) -> dict[str, Any]:
    """Return the keyword arguments with which `vil.data.image.read_image` reads a config's
    images."""
    return dict(
        value_range=cfg.DATA.VALUE_RANGE,
        channels=cfg.INPUT.CHANNELS,
        background=cfg.INPUT.BACKGROUND,
    )


def check_extras(names: Iterable[str]) -> None:
    """Raise DataError if a dataset needs a package that is not installed.

    Call this before the model is built. It checks the names of the datasets and does not open them.
    """
    for name in dict.fromkeys(names):
        if extra := EXTRAS.get(file_suffix(name) or name):
            require_extra(extra, f"the dataset {name}")


def check_open_files(workers: int, num_sets: int) -> None:
    """Increase this process's soft limit of open files if the data loaders' workers need more.

    workers: workers per loader. num_sets: number of evaluation sets. Raises ConfigError if the hard
    limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # at most two loaders run at a time, for training and one evaluation set; others are idle
    per_worker = 2 * FILES_PER_WORKER + FILES_PER_IDLE_WORKER * (num_sets - 1)
    needed = len(os.listdir("/dev/fd")) + per_worker * workers
    if workers and needed > soft != resource.RLIM_INFINITY:
        if needed > hard != resource.RLIM_INFINITY:
            raise ConfigError(
                f"DATALOADER.WORKERS {workers} may need {needed} open files, but the limit is "
                f"{hard} (ulimit -Hn): set fewer workers"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
