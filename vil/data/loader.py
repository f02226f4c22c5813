"""Data loaders: TrainLoader for any range of training steps, EvalLoader for a pass over a dataset.

The pixels of a training sample depend only on the seed, the epoch and the position in the epoch,
not on the number of workers or processes, or on the step at which a run resumes.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from vil.data.batch import Batch
from vil.data.dataset import ImageDataset, LoadableDataset
from vil.data.robust_dataset import BadSampleLog, RobustDataset
from vil.data.samplers import eval_batches, train_batches
from vil.data.workers import build_data_loader, iter_batches
from vil.utils.errors import DataError

TRIES = 10  # consecutive indices to try until an image can be read


class TrainLoader:
    """A loader that yields this process's training batches for any range of global steps. A range
    can span several epochs. The same worker processes load the whole range."""

    def __init__(
        self,
        dataset: LoadableDataset,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
        balanced: bool = False,
        max_bad_fraction: float = 0.01,
        bad_file: str | Path | None = None,
        **options: Any,
    ):
        """Create the loader. Raises DataError if the dataset has fewer than batch_size * world
        samples.

        Args:
            batch_size: samples per step in one process.
            rank, world: index of this process, and number of processes.
            repeats: copies of each sample, with different augmentations (repeated augmentation). An
                epoch keeps its length and has fewer distinct samples.
            balanced: sample all classes of an `ImageDataset` equally often.
            max_bad_fraction: loading raises DataError if a larger fraction of images is unreadable.
            bad_file: text file to which unreadable images are appended.
            options: workers, pin_memory and context of `build_data_loader`.
        """
        if repeats < 1:
            raise ValueError(f"`repeats` must be at least 1, got {repeats}")
        self.steps_per_epoch = len(dataset) // (batch_size * world)
        if self.steps_per_epoch == 0:
            raise DataError(
                f"a step of {batch_size} samples x {world} processes needs {batch_size * world} "
                f"samples, but the training set has {len(dataset)}: use a smaller batch size"
            )
        self.classes = dataset.classes
        self.batch_size = batch_size
        self.samples = RobustDataset(dataset, seed=seed, tries=TRIES)
        self.order: dict[str, Any] = dict(
            batch_size=batch_size,
            seed=seed,
            rank=rank,
            world=world,
            repeats=repeats,
            groups=getattr(dataset, "groups", None),
            balance=cast(ImageDataset, dataset).targets if balanced else None,
        )
        self.options = options
        self.bad_samples = BadSampleLog(len(dataset), max_bad_fraction, bad_file)

    def batches(self, start_step: int, stop_step: int) -> Iterator[Batch]:
        """Yield the batches of steps [start_step, stop_step). Closing the iterator stops the
        workers. Raises DataError if too many images cannot be read."""
        total = len(self.samples.dataset)
        order = train_batches(total, start=start_step, stop=stop_step, **self.order)
        loader = build_data_loader(self.samples, order, **self.options)
        with closing(iter_batches(loader)) as batches:
            for step, batch in enumerate(batches, start_step):
                self.bad_samples.record(batch.bad_samples)
                if len(batch) < self.batch_size:  # no substitute for a sample could be read
                    *_, name, reason = batch.bad_samples[-1]
                    raise DataError(
                        f"{TRIES} images in a row cannot be read, such as {name} ({reason}): "
                        "repair or remove these images"
                    )
                yield replace(batch, epoch=step // self.steps_per_epoch, step=step)

    def load_example(self, count: int) -> Batch:
        """Load the first `count` images of step 0, but at most one batch, without worker processes.

        Raises DataError if none of these images can be read.
        """
        order = next(train_batches(len(self.samples.dataset), start=0, stop=1, **self.order))
        batch = self.samples.collate([self.samples[position] for position in order[:count]])
        if not len(batch):
            *_, name, reason = batch.bad_samples[-1]
            raise DataError(
                f"none of the first {count} training images can be read, such as {name} "
                f"({reason}): repair or remove them"
            )
        return replace(batch, epoch=0, step=0)


class EvalLoader:
    """A loader that yields this process's share of a dataset in order, each time it is iterated.

    The shares of all processes together contain every sample exactly once. Workers stay alive
    between iterations. Unreadable images are omitted, and so are batches without a readable image.
    """

    def __init__(
        self,
        dataset: LoadableDataset,
        *,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        max_bad_fraction: float = 0.01,
        bad_file: str | Path | None = None,
        **options: Any,
    ):
        """Create the loader. See `TrainLoader` for the arguments."""
        self.num_samples = len(dataset)
        self.dataset, self.classes = dataset, dataset.classes
        self.order = eval_batches(len(dataset), batch_size=batch_size, rank=rank, world=world)
        samples = RobustDataset(dataset)
        self.loader = build_data_loader(samples, self.order, persistent=True, **options)
        self.bad_samples = BadSampleLog(len(dataset), max_bad_fraction, bad_file)

    def __len__(self) -> int:
        """Return the number of batches of this process. Iteration skips those in which no image can
        be read."""
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        for step, batch in enumerate(iter_batches(self.loader)):
            self.bad_samples.record(batch.bad_samples)
            if len(batch):
                yield replace(batch, step=step)
