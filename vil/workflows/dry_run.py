"""Check a config before a run: describe its data, and run one step on synthetic images."""

import io
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from yacs.config import CfgNode

from vil.config import override
from vil.config.yaml_source import from_mapping
from vil.data.inspection import size_range
from vil.engine.logger import memory_mb
from vil.optim.build import warn_long_average
from vil.tasks import refuse_without, task_for, with_num_classes
from vil.tasks.base import Task
from vil.tasks.cost import num_params
from vil.utils.console import printable
from vil.utils.contact_sheet import draw_images
from vil.utils.errors import DataError
from vil.utils.output_paths import make_folder, output_file, replacing
from vil.utils.plural import plural
from vil.workflows.log_forwarding import DistinctWarnings, log_warnings_once
from vil.workflows.train import train_config

logger = logging.getLogger(__name__)

EXAMPLES = 16  # images on the example sheet
SIZES = 32  # images per dataset whose size is read


@dataclass(frozen=True)
class DatasetSummary:
    """Contents of one dataset of a config.

    split: "train", "val" or "test". The best checkpoint is selected on "val".
    class_counts: {class: number of images or objects}; {} if they are not counted.
    remark: a text about the images, such as those without an object; "" for none.
    sizes: (width, height) in pixels of images in a sample of evenly spaced images.
    unreadable: number of unreadable images in this sample. example: name of the first of them.
    """

    name: str
    split: str
    num_images: int
    num_classes: int
    class_counts: Mapping[str, int]
    sizes: list[tuple[int, int]]
    remark: str = ""
    unreadable: int = 0
    example: str = ""

    @property
    def size_range(self) -> list[tuple[int, int]]:
        """(width, height) of the smallest, the median and the largest image in `sizes`, by area; []
        if `sizes` is empty."""
        return size_range(self.sizes)


@dataclass(frozen=True)
class DataSummary:
    """Contents of the datasets of a config.

    counted: plural noun for what each dataset's `class_counts` counts, such as "images".
    note: how the datasets differ from those of a training run; "" if they do not.
    example: image file of the first augmented training images and their targets; None if it was not
      written.
    learned_settings: {config key: value}, derived from the training set by the task.
    """

    datasets: list[DatasetSummary]
    steps_per_epoch: int
    counted: str = "images"
    note: str = ""
    example: Path | None = None
    learned_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run, which trains one step on synthetic images.

    num_images: number of synthetic images in the step.
    loss: NaN if the step was skipped because the loss or a gradient was not finite, which is normal
    for the first steps in float16.
    memory_mb: peak memory in MiB.
    log: all lines that a run would log; empty on ranks other than 0.
    """

    data: DataSummary
    num_images: int
    loss: float
    memory_mb: float
    num_parameters: int
    warnings: list[str]
    log: list[str]


def dry_run(
    cfg: CfgNode,
    *,
    example: str | Path | None = None,
    show: Callable[[DataSummary], Any] | None = None,
) -> DryRun:
    """Describe the config's data, then run one training step on synthetic images. OUTPUT_DIR is not
    created.

    example: image file to write, which shows the first augmented training images. The default is
    `<OUTPUT_DIR>.dry-run.png`. show: called with the data summary before the training step.

    Raises DataError or ConfigError if the data are missing or invalid or the example file cannot be
    written, and KeyboardInterrupt on Ctrl-C.
    """
    with log_warnings_once() as distinct:
        cfg = with_num_classes(cfg, trains=True)
        task = task_for(cfg, torch.device("cpu"))
        summary = summarize_data(task, ", ".join(cfg.DATA.TRAIN), cfg.OUTPUT_DIR, example)
        if show:
            show(summary)
        for found in summary.datasets:
            if found.unreadable > cfg.DATA.MAX_BAD_FRACTION * found.num_images:
                images = plural(found.unreadable, "image")
                raise DataError(
                    f"{images} of {found.name} cannot be read, such as "
                    f"{found.example}, more than the allowed fraction of "
                    f"{cfg.DATA.MAX_BAD_FRACTION} (DATA.MAX_BAD_FRACTION): repair or remove the "
                    "images that vil data check lists, or increase the fraction"
                )
        why = "--dry-run trains on images of its method synthetic, which it does not have"
        refuse_without(cfg.TASK, "synthetic", why)
        num_images = cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE
        with tempfile.TemporaryDirectory() as folder:
            changes = [f"OUTPUT_DIR={folder}", "RUN.MAX_BAD_STEPS=1"]  # a skipped step is no error
            changes += ["MODEL.VIT.MSVIT.TUNE=False"]  # tuning may take minutes
            changes += ["DISTILL.CACHE="]  # which would keep what belongs to synthetic images
            trial = override(cfg, [*changes, *from_mapping(summary.learned_settings)])
            task = task_for(trial, torch.device("cpu"))
            synthetic = {s: task.synthetic(num_images, Path(folder), s) for s in ("train", "val")}
            with _collect_warnings(distinct) as warnings, redirect_stdout(io.StringIO()):
                warn_long_average(cfg, summary.steps_per_epoch)
                warn_left_out(summary, num_images)
                result = train_config(trial, max_steps=1, synthetic=synthetic)
            if result.status == "interrupted":
                raise KeyboardInterrupt
            log_file = Path(folder, "log.txt")
            log = log_file.read_text("utf-8").splitlines() if log_file.exists() else []
            loss = result.history()[-1].get("loss", math.nan) if log else math.nan
    return DryRun(
        data=summary,
        num_images=num_images,
        loss=loss,
        memory_mb=memory_mb(),
        num_parameters=num_params(result.model),
        warnings=warnings,
        log=log,
    )


def warn_left_out(data: DataSummary, batch: int) -> None:
    """Log a warning if more than a tenth of the training images are left out of each epoch, because
    they do not fill a step of `batch` images."""
    images = 0 if data.note else data.datasets[0].num_images
    if images % batch > 0.1 * images:
        text = "%d of %d training images are left out of each epoch, others each time: a smaller "
        logger.warning(text + "DATALOADER.BSZ uses more", images % batch, images)


@contextmanager
def _collect_warnings(distinct: DistinctWarnings) -> Iterator[list[str]]:
    """Collect the package's warnings in a `with` block. Yields the list of their messages.
    distinct: filter that drops repeated warnings."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    handler.addFilter(distinct)
    logging.getLogger("vil").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("vil").removeHandler(handler)


def summarize_data(
    task: Task, name: str, output_dir: str, example: str | Path | None = None
) -> DataSummary:
    """Open the datasets of a task and describe them.

    name: name of the training set. output_dir, example: image file to write, which shows the first
    augmented training images, see `dry_run`. Only rank 0 writes this file.
    """
    with task.open_data() as data:
        train = data.train.samples.dataset
        sets = [_summarize(task, name, "train", train, data.note)]
        for part, tests in data.tests.items():
            for test_name, test in tests.items():
                sets.append(_summarize(task, test_name, part, test.dataset, data.note))
        drawn = task.draw_batch(task.prepare(data.train.load_example(EXAMPLES)))
        file = None
        if drawn and os.environ.get("RANK", "0") == "0":
            file = _example_file(output_dir, example)
            with replacing(file, "--example") as aside:
                draw_images(drawn).save(aside, file.suffix.lstrip(".") or "png")
        return DataSummary(
            datasets=sets,
            steps_per_epoch=data.train.steps_per_epoch,
            counted=task.counted,
            note=data.note,
            example=file,
            learned_settings=dict(task.learned_settings),
        )


def _example_file(output_dir: str, given: str | Path | None) -> Path:
    """Return the path of the file for the example images: `given` or, if it is None, a path next to
    `output_dir`."""
    if given is not None:
        return output_file(given, "--example", (".png",))
    file = Path(f"{Path(output_dir)}.dry-run.png")
    make_folder(file.parent, "OUTPUT_DIR")
    return output_file(file, "OUTPUT_DIR", (".png",))


def _summarize(task: Task, name: str, split: str, dataset: Dataset, note: str) -> DatasetSummary:
    """Describe one dataset.

    split: "train", "val" or "test". note: as in `DataSummary`. If `note` is not empty, images are
    not counted: `class_counts` is {} and `remark` is empty.
    """
    sizes, unreadable = [], []
    for index in np.linspace(0, len(dataset) - 1, min(len(dataset), SIZES)).astype(int).tolist():
        try:
            image = dataset.image(index)  # a PIL image or a `BandImage`
            sizes.append((image.width, image.height))
        except OSError:
            unreadable.append(printable(dataset.sample_name(index)))
    return DatasetSummary(
        name=name,
        split=split,
        num_images=len(dataset),
        num_classes=len(dataset.classes),
        class_counts={} if note else task.count_classes(dataset),
        sizes=sizes,
        remark="" if note else task.describe_images(dataset),
        unreadable=len(unreadable),
        example=next(iter(unreadable), ""),
    )
