"""TrainLoader yields the batches of a range of steps, EvalLoader those of one pass.

The pixels of a training sample are a function of (seed, epoch, position). They do not depend on the
number of workers, the number of processes, or the step at which a run resumes.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vil.data.batch import Batch
from vil.data.dataset import LoadableDataset
from vil.data.robust_dataset import BadSampleLog, RobustDataset
from vil.data.samplers import eval_batches, train_batches
from vil.data.workers import (
    build_data_loader,
    iter_batches,
    start_workers,
    stop_at_exit,
    stop_workers,
)
from vil.utils.errors import DataError

# How many consecutive samples are tried in place of one that cannot be read.
TRIES = 10


class TrainLoader:
    """Batches of any range of global steps, across epochs, from one set of workers."""

    def __init__(
        self,
        dataset: LoadableDataset,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
        workers: int = 0,
        pin_memory: bool = False,
        max_bad_fraction: float = 0.01,
        bad_file: str | Path | None = None,
        context: str | None = None,
    ):
        """
        Args:
            batch_size: of one process.
            repeats: above 1, repeated augmentation: as many samples per epoch, fewer distinct ones.
            max_bad_fraction: of unreadable images, above which loading raises DataError.
            bad_file: lists the unreadable images.
            context: start method of multiprocessing.
        """
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, given {repeats}")
        self.steps_per_epoch = len(dataset) // (batch_size * world)
        if self.steps_per_epoch == 0:
            raise DataError(
                f"a batch of {batch_size} x {world} processes needs {batch_size * world} samples, "
                f"and the training set has {len(dataset)}"
            )
        self.classes = dataset.classes
        self.samples = RobustDataset(dataset, seed=seed, tries=TRIES)
        self.order = {
            "batch_size": batch_size,
            "seed": seed,
            "rank": rank,
            "world": world,
            "repeats": repeats,
            "groups": getattr(dataset, "groups", None),
        }
        self.options = {"workers": workers, "pin_memory": pin_memory, "context": context}
        self.bad_samples = BadSampleLog(len(dataset), max_bad_fraction, bad_file)

    def batches(self, start_step: int, stop_step: int) -> Iterator[Batch]:
        """Yield the batches of steps [start_step, stop_step). close() on it stops the workers.

        Raises DataError if too many images cannot be read.
        """
        steps = range(start_step, stop_step)
        order = train_batches(
            len(self.samples.dataset), start=start_step, stop=stop_step, **self.order
        )
        iterator = start_workers(build_data_loader(self.samples, order, **self.options))
        stop_at_exit(iterator)
        try:
            for step, batch in zip(steps, iter_batches(iterator)):
                self.bad_samples.record(batch.bad_samples)
                self.check_full(batch)
                yield replace(batch, epoch=step // self.steps_per_epoch, step=step)
        finally:
            stop_workers(iterator)

    def check_full(self, batch: Batch) -> None:
        """Raise DataError if no substitute was found for a sample."""
        if len(batch) < self.order["batch_size"]:
            last = batch.bad_samples[-1]
            raise DataError(
                f"{TRIES} images in a row cannot be read: repair or remove them; "
                f"the last: {last.name} ({last.reason})"
            )


class EvalLoader:
    """This process's share of a dataset, in order. Over all processes every sample comes once.

    It can be iterated again; the workers are kept. Unreadable images are left out of their batch.
    """

    def __init__(
        self,
        dataset: LoadableDataset,
        *,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        pin_memory: bool = False,
        max_bad_fraction: float = 0.01,
        bad_file: str | Path | None = None,
        context: str | None = None,
    ):
        self.num_samples = len(dataset)
        self.dataset = dataset
        self.classes = dataset.classes
        self.order = eval_batches(len(dataset), batch_size=batch_size, rank=rank, world=world)
        self.loader = build_data_loader(
            RobustDataset(dataset),
            self.order,
            workers=workers,
            pin_memory=pin_memory,
            context=context,
            persistent=True,
        )
        self.bad_samples = BadSampleLog(len(dataset), max_bad_fraction, bad_file)
        self.started = None

    def __len__(self) -> int:
        """Number of batches of this process. Batches without a readable image are skipped."""
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        iterator = start_workers(self.loader)
        if iterator is not self.started:  # persistent workers: torch returns the same iterator
            self.started = iterator
            stop_at_exit(iterator)
        for step, batch in enumerate(iter_batches(iterator)):
            self.bad_samples.record(batch.bad_samples)
            if len(batch):
                yield replace(batch, step=step)
