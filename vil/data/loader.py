"""The two loaders. Training asks for steps, evaluation for one pass; both give Batches.

A training sample's pixels are a function of (seed, epoch, position): not of the number of workers,
nor of the number of processes, nor of the step at which the run was resumed.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vil.data.batch import Batch
from vil.data.dataset import LoadableDataset
from vil.data.robust_dataset import BadSampleLog, RobustDataset
from vil.data.samplers import eval_batches, train_batches
from vil.data.workers import build_data_loader, iter_batches, start, stop_at_exit, stop_workers
from vil.utils.errors import DataError

# How many successive samples are tried in place of one that cannot be read.
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
        """batch_size is that of one process; context is a start method of multiprocessing.

        repeats > 1 is repeated augmentation: as many samples per epoch, fewer distinct ones. A
        dataset's `groups` are kept apart (samplers.in_groups).
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
        """The batches of steps [start_step, stop_step). close() on it ends the workers.

        Raises DataError when too many pictures cannot be read.
        """
        steps = range(start_step, stop_step)
        order = train_batches(
            len(self.samples.dataset), start=start_step, stop=stop_step, **self.order
        )
        iterator = start(build_data_loader(self.samples, order, **self.options))
        stop_at_exit(iterator)
        try:
            for step, batch in zip(steps, iter_batches(iterator)):
                self.bad_samples.record(batch.bad_samples)
                self.refuse_gaps(batch)
                yield replace(batch, epoch=step // self.steps_per_epoch, step=step)
        finally:
            stop_workers(iterator)

    def refuse_gaps(self, batch: Batch) -> None:
        """DataError when a sample found no substitute."""
        if len(batch) < self.order["batch_size"]:
            last = batch.bad_samples[-1]
            raise DataError(
                f"{TRIES} images in a row cannot be read: mend or remove them; "
                f"the last: {last.name} ({last.reason})"
            )


class EvalLoader:
    """This process's share of a dataset, in order; over all processes every sample exactly once.

    Iterate as often as needed: the workers stay. Unreadable images are left out of their batch.
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
        """Batches of this process; fewer come when all pictures of one cannot be read."""
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        iterator = start(self.loader)
        if iterator is not self.started:  # the same object again once there are workers
            self.started = iterator
            stop_at_exit(iterator)
        for step, batch in enumerate(iter_batches(iterator)):
            self.bad_samples.record(batch.bad_samples)
            if len(batch):
                yield replace(batch, step=step)
