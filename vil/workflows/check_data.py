"""Check the datasets of a config before training: contents, unreadable images and leaks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from yacs.config import CfgNode

from vil.config import override
from vil.config.defaults import KEYS, leaves
from vil.config.yaml_source import format_options
from vil.data.bands import to_display
from vil.data.classes import match_classes
from vil.data.inspection import (
    LISTED,
    Duplicates,
    Inspection,
    find_duplicates,
    inspect,
    size_range,
)
from vil.data.target_summary import EXAMPLES, TargetSummary
from vil.data.workers import count_workers, worker_errors
from vil.tasks import task_for
from vil.tasks.base import Task
from vil.utils.console import printable
from vil.utils.contact_sheet import draw_rows
from vil.utils.errors import DataError
from vil.utils.machine import usable_cores
from vil.utils.output_paths import replacing
from vil.utils.plural import plural
from vil.utils.text_table import align
from vil.workflows.configure import Overrides, make_config

TRAIN = "train"
IMBALANCE = 5  # largest / smallest class above which a balanced loss or sampler is suggested
SIDES = (32, 48, 64, 96, 128, 160, 192, 224)  # image sizes to suggest
MOST_CLASSES = 40  # rows of the printed table of classes
RANGES = (255, 1023, 4095, 16383)  # largest values of 8, 10, 12 and 14 bits stored in 16
VAL_FRACTION = 0.2
MOST_WORKERS = 8


@dataclass
class SplitCheck:
    """Result of checking one split of a dataset, such as the training set. images: statistics of
    the images. targets: summary of the targets. dataset: the images and targets of the split."""

    images: Inspection
    targets: TargetSummary
    dataset: Any = field(repr=False)


@dataclass
class DataCheck:
    """Result of `check_data`.

    task: value of the config key TASK.
    splits: {"train", "val/<set>" or "test/<set>": result of checking this split}.
    duplicates: images that occur several times.
    problems: reasons why the data cannot be used. A reason may have several lines.
    warnings: reasons why metrics may be misleading.
    suggestions: {config key: value that fits the data better}. reasons: {key: why}.
    """

    task: str
    splits: dict[str, SplitCheck]
    duplicates: Duplicates
    problems: list[str]
    warnings: list[str]
    suggestions: dict[str, Any]
    reasons: dict[str, str]

    @property
    def is_usable(self) -> bool:
        return not self.problems

    def raise_if_unusable(self) -> None:
        """Raise DataError if the data cannot be used for training. The message has each reason."""
        if self.problems:
            raise DataError("; ".join(self.problems))

    def lines(self) -> list[str]:
        """Return the result of the data check as lines of text."""
        return [
            *self._split_lines(),
            *self._class_lines(),
            *self._target_lines(),
            *(f"unreadable: {line}" for line in self._unreadable()),
            *(f"warning: {line}" for line in self.warnings),
            *(f"problem: {line}" for line in self.problems),
            *(["suggested keys:"] if self.suggestions else []),
            *(
                f"  {format_options({key: value})}  # {self.reasons[key]}"
                for key, value in self.suggestions.items()
            ),
        ]

    def _split_lines(self) -> list[str]:
        rows = [["", "images", "unreadable", "blank", "min", "median", "max width x height"]]
        for name, split in self.splits.items():
            images = split.images
            sizes = [f"{w} x {h}" for w, h in size_range(images.sizes)] or ["-"] * 3
            counts = images.num_images, images.unreadable, int(images.is_blank.sum())
            rows.append([printable(name), *map(str, counts), *sizes])
        lines = align(rows).splitlines() if self.splits else []
        for name, split in self.splits.items():
            if (opened := split.images.num_opened) < split.images.num_images:
                sample = f"a sample of {plural(opened, 'image')}"
                lines.append(f"{name}: sizes, colors and duplicates of {sample}")
        return lines

    def _class_lines(self) -> list[str]:
        names = list(dict.fromkeys(chain(*(s.targets.counts for s in self.splits.values()))))
        if not names:
            return []
        rows = [
            [printable(name), *(str(s.targets.counts.get(name, 0)) for s in self.splits.values())]
            for name in names
        ]
        hidden = len(rows) - MOST_CLASSES
        if hidden > 0:
            first = next(iter(self.splits.values())).targets.counts
            order = sorted(range(len(names)), key=lambda i: -first.get(names[i], 0))
            half = MOST_CLASSES // 2
            rows = [rows[i] for i in order[:half] + order[-half:]]
        heading = ["class", *map(printable, self.splits)]
        lines = ["", *align([heading, *rows]).splitlines()]
        if hidden > 0:
            lines.append(f"the largest and smallest classes; {hidden} more are not listed")
        for name, split in self.splits.items():
            if ratio := imbalance(split.targets.counts):
                lines.append(
                    f"{name}: the largest class has {ratio:.1f} x the images of the smallest"
                )
        return [*lines, ""]

    def _target_lines(self) -> list[str]:
        lines = []
        for name, split in self.splits.items():
            for column, (low, middle, high) in split.targets.columns.items():
                values = f"min {low:g}, median {middle:g}, max {high:g}"
                lines.append(f"{name}: {printable(column)}: {values}")
            lines += [f"{name}: {note}" for note in split.targets.notes]
        return lines

    def _unreadable(self) -> list[str]:
        lines = []
        for name, split in self.splits.items():
            bad = split.images.bad_samples
            lines += [f"{name}: {printable(each.name)} ({printable(each.reason)})" for each in bad]
            if (more := split.images.unreadable - len(bad)) > 0:
                lines.append(f"{name}: and {more} more")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the result of the data check as a dict of plain values, for JSON."""
        leaks = [dict(first=a, second=b, images=n) for (a, b), n in self.duplicates.leaks.items()]
        return dict(
            task=self.task,
            usable=self.is_usable,
            splits={name: split_to_dict(split) for name, split in self.splits.items()},
            duplicates=self.duplicates.within,
            leaks=leaks,
            warnings=self.warnings,
            problems=self.problems,
            suggestions=self.suggestions,
        )

    def draw(self, file: str | Path) -> None:
        """Draw a contact sheet with a few images per class of each split, and save it as a PNG
        file."""
        rows = [
            (f"{name}: {caption}", read_examples(split.dataset, indices))
            for name, split in self.splits.items()
            for caption, indices in split.targets.groups
        ]
        with replacing(Path(file), "--sheet") as aside:
            draw_rows(rows, EXAMPLES, aside)


def check_data(
    config: CfgNode | str | Path | None = None,
    overrides: Overrides | None = None,
    *,
    data: str | Path | None = None,
    max_images: int | None = None,
    imports: Sequence[str] = (),
) -> DataCheck:
    """Read all datasets of a config, and report their contents, problems and warnings.

    config, overrides, data, imports: see `vil.train`. max_images: number of images to open in each
    split, evenly spaced; None for all. Raises ConfigError if the config is invalid, and DataError
    if DATA.PATH does not exist.
    """
    cfg = make_config(config, overrides, data=data, imports=imports)
    # the number does not matter, because `Task.open_split` ignores it
    counted = override(cfg, ["DATA.NUM_CLASSES=1"]) if cfg.DATA.NUM_CLASSES == "auto" else cfg
    task = task_for(counted, torch.device("cpu"))
    splits, problems, missing, misfits = {}, [], [], []
    for label, name, part in list_splits(cfg.DATA.VAL, cfg.DATA.TEST):
        try:
            dataset = task.open_split(name, part)
            # "": a task that ignores the targets of its images
            if splits and not cfg.DATA.TARGETMAP and getattr(task, "target_type", None) != "":
                by_position = cfg.DATA.CLASSES == "by_position"
                match_classes(dataset, task.class_names, label, by_position=by_position)
        except DataError as error:
            if not Path(cfg.DATA.PATH).exists():
                raise
            missing.append(label)
            text = "\n".join(map(printable, str(error).splitlines()))  # may show folders
            problems.append(f"{label}: {text}")
            continue
        task.class_names = task.class_names or dataset.classes
        with worker_errors():
            workers = count_workers(cfg.DATALOADER.WORKERS, task.device)
            images = inspect(dataset, workers=workers, max_images=max_images)
        splits[label] = SplitCheck(images, task.summarize_targets(dataset), dataset)
        for misfit in task.find_misfits(dataset, images.indices, images.sizes):
            matters = label == TRAIN or getattr(misfit, "stops_evaluation", False)
            unusable = misfit.is_common and matters
            (problems if unusable else misfits).append(f"{label}: {misfit}")
    duplicates = find_duplicates({name: split.images for name, split in splits.items()})
    for name, split in splits.items():
        problems += find_problems(name, split, cfg.DATA.MAX_BAD_FRACTION)
    warnings = [*misfits, *find_warnings(splits, duplicates)]
    suggestions = suggest(cfg, task, splits, missing)
    return DataCheck(
        task=cfg.TASK,
        splits=splits,
        duplicates=duplicates,
        problems=problems,
        warnings=warnings,
        suggestions={key: value for key, (value, _) in suggestions.items()},
        reasons={key: reason for key, (_, reason) in suggestions.items()},
    )


def list_splits(val: Sequence[str], test: Sequence[str]) -> list[tuple[str, str | None, str]]:
    """List the splits of a config as (label, name, part), such as ("val/pets", "pets", "val").

    val, test: the names in DATA.VAL and DATA.TEST. label: name of the split in the report. part:
    "val" or "test". If `val` is empty, the names in `test` have the part "val" instead of "test".
    The training split comes first, as ("train", None, "").
    """
    parts = {"val": val, "test": test} if val else {"val": test}
    held_out = [(f"{part}/{name}", name, part) for part, names in parts.items() for name in names]
    return [(TRAIN, None, ""), *held_out]


def find_problems(name: str, split: SplitCheck, max_bad_fraction: float) -> list[str]:
    """Return the reasons why training or evaluation on a split would fail, one line per reason.
    name: name of the split, such as "train" or "val/pets". max_bad_fraction: the value of
    DATA.MAX_BAD_FRACTION."""
    images, problems = split.images, []
    if not len(images.indices):
        return [f"{name}: none of the {plural(images.num_opened, 'image')} can be read"]
    if images.unreadable > max_bad_fraction * images.num_opened:
        problems.append(
            f"{name}: {images.unreadable} of {images.num_opened} images cannot be read, more than "
            f"the allowed fraction of {max_bad_fraction}: remove them, or raise "
            "DATA.MAX_BAD_FRACTION"
        )
    return problems


def find_warnings(splits: dict[str, SplitCheck], duplicates: Duplicates) -> list[str]:
    """Return lines of text about data that may distort metrics: leaks, duplicates, images in
    several classes, blank images, and classes without images."""
    lines = []

    def say(text: str, pairs: Any) -> None:
        (a, i), (b, j) = duplicates.examples[pairs][0]
        first, second = (splits[s].dataset.sample_name(n) for s, n in ((a, i), (b, j)))
        lines.append(f"{text}, such as {printable(first)} and {printable(second)}")

    for (a, b), count in duplicates.leaks.items():
        images = plural(count, f"image of {b} is", f"images of {b} are")
        say(f"{images} also in {a} (a leak: metrics are too good)", (a, b))
    for name, count in duplicates.within.items():
        images = plural(count, "image is a copy of another", "images are copies of others")
        say(f"{name}: {images}", name)
    if conflicts := find_conflicts(list(splits.values())):
        images = plural(len(conflicts), "image is", "images are")
        lines.append(f"{images} in several classes: {'; '.join(conflicts[:LISTED])}")
    for name, split in splits.items():
        blank = split.images.indices[split.images.is_blank][:LISTED].tolist()
        if blank:
            names = ", ".join(printable(split.dataset.sample_name(index)) for index in blank)
            images = plural(int(split.images.is_blank.sum()), "image has", "images have")
            lines.append(f"{name}: {images} almost one color: {names}")
        empty = [printable(c) for c, count in split.targets.counts.items() if not count]
        if empty:
            more = ", ..." if len(empty) > LISTED else ""
            listed = ", ".join(empty[:LISTED])
            classes = plural(len(empty), "class has", "classes have")
            lines.append(f"{name}: {classes} no images: {listed}{more}")
    return lines


def find_conflicts(splits: Sequence[SplitCheck]) -> list[str]:
    """Find images that occur in more than one class, within a split or in different splits. For
    each such image, returns a text that names two of its files and their classes."""
    splits = [split for split in splits if getattr(split.dataset, "target_type", "") == "class"]
    digests = [split.images.digests for split in splits]
    contents, counts = np.unique(np.concatenate(digests or [[]]), return_counts=True)
    files: dict[bytes, dict[str, str]] = {}  # {content: {class: its first file}}
    for dataset, images in ((split.dataset, split.images) for split in splits):
        for row in np.flatnonzero(np.isin(images.digests, contents[counts > 1])).tolist():
            index = int(images.indices[row])
            label = dataset.classes[int(dataset.targets[index])]
            name = f"{printable(dataset.sample_name(index))} ({printable(label)})"
            files.setdefault(images.digests[row].tobytes(), {}).setdefault(label, name)
    return [", ".join([*of_class.values()][:2]) for of_class in files.values() if len(of_class) > 1]


def suggest(
    cfg: CfgNode, task: Task, splits: dict[str, SplitCheck], missing: list[str]
) -> dict[str, tuple[Any, str]]:
    """Suggest config values that fit the data better than those of the config.

    splits: {name of a split, such as "val/pets": result of checking it}. missing: names of the
    splits that cannot be opened. Returns {config key: (suggested value, reason)}.

    INPUT.MEAN and INPUT.STD are suggested if they differ from those of the training images by more
    than 0.02. The suggested INPUT.IMAGE_SIZE is the largest size in SIDES that is not above the
    median of the images' shorter sides, unless the config's value is close to it. DATA.VALUE_RANGE
    is suggested if images of 16 bits only use the values of 8, 10, 12 or 14 bits.
    """
    found: dict[str, tuple[Any, str]] = {}
    train = splits.get(TRAIN)
    can_split = getattr(task, "has_splits", False) and not cfg.DATA.VAL_FRACTION
    if train and can_split and any(label.startswith("val/") for label in missing):
        found["DATA.VAL_FRACTION"] = VAL_FRACTION, "there is no validation set"
    cores = usable_cores()
    if cfg.DATALOADER.WORKERS == 0 and cores > 1:
        found["DATALOADER.WORKERS"] = min(cores, MOST_WORKERS), f"this machine has {cores} cores"
    if train and len((images := train.images).indices):
        if cfg.DATA.NUM_CLASSES not in ("auto", num_classes := len(train.dataset.classes)):
            found["DATA.NUM_CLASSES"] = num_classes, "the number in the training set"
        step = cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE
        if images.num_images < step:
            few = f"a step of {step} images is larger than the training set"
            found["DATALOADER.BSZ"] = max(images.num_images // 4, 1), few
            found["OPTIM.ACCUMULATE"] = 1, few
        if not (cfg.MODEL.MODEL_PATH or cfg.MODEL.PRETRAINED):
            for key, values in (("INPUT.MEAN", images.mean), ("INPUT.STD", images.std)):
                given = np.broadcast_to(leaves(cfg)[key], (len(values),))
                if np.abs(given - values).max() > 0.02:
                    numbers = [max(round(float(value), 3), 0.001) for value in values]
                    found[key] = numbers, "of the training images"
        fits = [limit for limit in RANGES if 0 < images.largest <= limit]
        if fits and not cfg.DATA.VALUE_RANGE:
            reason = f"the largest value of the images of 16 bits is {images.largest}"
            found["DATA.VALUE_RANGE"] = [0, fits[0]], reason
        if task.resizes_to_image_size:
            shorter = float(np.median(images.sizes.min(1)))
            side = max((side for side in SIDES if side <= shorter), default=SIDES[0])
            if not 3 / 4 <= side / cfg.INPUT.IMAGE_SIZE <= 4 / 3:
                sides = f"{', '.join(map(str, SIDES[:2]))}, ..., {SIDES[-1]}"
                found["INPUT.IMAGE_SIZE"] = (
                    side,
                    f"the largest of {sides} px that is not above the median shorter side of the "
                    f"training images, {shorter:g} px",
                )
        is_plain = list(cfg.LOSS.CLASS_WEIGHTS) == ["none"] and cfg.DATALOADER.SAMPLER == "random"
        has_weights = getattr(task, "target_type", "") in ("class", "labels")
        if has_weights and is_plain and (ratio := imbalance(train.targets.counts) or 0) > IMBALANCE:
            reason = f"the largest class has {ratio:.1f} x the images of the smallest"
            found["LOSS.CLASS_WEIGHTS"] = "balanced", reason
    return {
        key: (value, reason)
        for key, (value, reason) in found.items()
        if key in KEYS and value != leaves(cfg)[key]
    }


def imbalance(counts: dict[str, int]) -> float | None:
    """Return the number of images of the largest class, divided by the number of images of the
    smallest class. Classes without images are ignored. Returns None if fewer than two classes have
    images. counts: {class: number of images}."""
    present = [count for count in counts.values() if count]
    return max(present) / min(present) if len(present) > 1 else None


def split_to_dict(split: SplitCheck) -> dict[str, Any]:
    images, targets = split.images, split.targets
    return dict(
        images=images.num_images,
        opened=images.num_opened,
        unreadable=images.unreadable,
        unreadable_names=[[bad.name, bad.reason] for bad in images.bad_samples],
        blank=int(images.is_blank.sum()),
        sizes=dict(zip(("min", "median", "max"), size_range(images.sizes))),
        mean=images.mean.tolist(),
        std=images.std.tolist(),
        classes=targets.counts,
        imbalance=imbalance(targets.counts),
        numbers=targets.columns,
        notes=targets.notes,
    )


def read_examples(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Read the images with the given indices from a dataset. Skip those that cannot be read."""
    images = []
    for index in indices:
        try:
            images.append(to_display(dataset.image(index)))
        except OSError:
            continue
    return images
