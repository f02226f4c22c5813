"""Skip unreadable images, log each of them once, and raise DataError if there are too many."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from vil.data.batch import BadSample
from vil.data.dataset import CollatableDataset
from vil.data.samplers import Position, fork_rng
from vil.utils.console import echo_error, printable
from vil.utils.errors import DataError

logger = logging.getLogger(__name__)


class RobustDataset(Dataset):
    """A dataset wrapper that replaces each unreadable image by the next readable one.

    robust[position] returns (sample, reports). `sample` is (image, target, index) of the first
    readable image among the `tries` images from position.index on, or None if there is none.
    `reports` has a BadSample for each unreadable image that was tried. The random augmentation is
    seeded with (seed, position.epoch, position.position).
    """

    def __init__(self, dataset: CollatableDataset, *, seed: int = 0, tries: int = 1):
        self.dataset, self.seed, self.tries = dataset, seed, tries

    def __getitem__(self, index: Position) -> tuple[tuple | None, list[BadSample]]:
        reports = []
        for offset in range(self.tries):
            tried = (index.index + offset) % len(self.dataset)
            try:
                with fork_rng("augment", self.seed, index.epoch, index.position):
                    return (*self.dataset[tried], tried), reports
            except OSError as error:
                reason = " ".join(str(error).split())
                reports.append(BadSample(tried, self.dataset.sample_name(tried), reason))
        return None, reports

    def collate(self, rows: list[tuple[tuple | None, list[BadSample]]]) -> Any:
        """Collate (sample, reports) pairs into a batch.

        Calls the wrapped dataset's `collate` with two arguments: a list of the samples that are not
        None, and a tuple of all reports.
        """
        samples = [sample for sample, _ in rows if sample is not None]
        return self.dataset.collate(samples, tuple(bad for _, reports in rows for bad in reports))


class BadSampleLog:
    """A log and a counter of the unreadable images that all workers of this process report.

    total: number of samples in the dataset. max_fraction: tolerated fraction of unreadable images.
    file: text file to which the images are appended, one per line.
    """

    def __init__(self, total: int, max_fraction: float, file: str | Path | None = None):
        self.total, self.max_fraction, self.file = total, max_fraction, file
        self.seen: set[int] = set()

    def record(self, reports: Iterable[BadSample]) -> None:
        """Log the images that were not reported before. Raises DataError if more than max_fraction
        of the dataset is unreadable."""
        for index, name, reason in reports:
            if index in self.seen:
                continue
            self.seen.add(index)
            name, reason = printable(name), printable(reason)  # without control characters
            count = f"{len(self.seen)} of {self.total}"
            logger.warning("unreadable image (%s so far): %s: %s", count, name, reason)
            if self.file is not None:
                append_line(self.file, f"{name}\t{reason}\n")
            if len(self.seen) > self.max_fraction * self.total:
                raise DataError(
                    f"{count} images cannot be read, more than the "
                    f"allowed fraction of {self.max_fraction} (DATA.MAX_BAD_FRACTION): repair or "
                    "remove the images listed in the run's bad_samples.txt, or increase the "
                    f"fraction. The last unreadable image is {name} ({reason})"
                )


def append_line(path: str | Path, line: str) -> None:
    """Append a line to a file, unless the file already contains the line. If the file cannot be
    written, for example on a full disk, print an error to stderr, so that the run continues."""
    try:
        with open(path, "a+", encoding="utf-8", errors="surrogateescape") as file:
            file.seek(0)
            if line not in file:
                file.write(line)
    except OSError as error:
        echo_error(f"vil: {path} cannot be written: {error.strerror or error}")
