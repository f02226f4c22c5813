"""Worker processes of the loaders: start, signals, errors and shutdown."""

import atexit
import multiprocessing
import re
import signal
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

import torch
from torch.utils.data import DataLoader

from vil.data.robust_dataset import RobustDataset
from vil.data.samplers import Position
from vil.utils.errors import DataError

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
STARTED = weakref.WeakSet()  # iterators of DataLoaders, whose workers stop at exit
DEATH = re.compile(r"DataLoader (worker \(pid.*?\)) (.*?)\.?( Details are lost.*)?\s*", re.DOTALL)


def build_data_loader(
    samples: RobustDataset,
    batches: Iterable[list[Position]],
    *,
    workers: int = 0,
    pin_memory: bool = False,
    context: str | None = None,
    persistent: bool = False,
) -> DataLoader:
    """A DataLoader over lists of Position. `context` is the start method of multiprocessing."""
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=samples.collate,
        pin_memory=pin_memory,
        worker_init_fn=ignore_signals,
        multiprocessing_context=context if workers else None,
        persistent_workers=persistent and workers > 0,
        generator=torch.Generator(),  # the global one would advance; each sample is seeded again
    )


def iter_batches(loader: DataLoader) -> Iterator:
    """Yield the batches of one pass. close() stops the workers, unless they are persistent.

    Raises RuntimeError with the pid if a worker has died. The connection to it may fail before
    SIGCHLD arrives: torch's handler, which knows the pid, raises during the sleep.
    """
    iterator = start_workers(loader)
    try:
        yield from iterator
    except (ConnectionError, EOFError):
        time.sleep(1)
        raise
    finally:
        if not loader.persistent_workers:
            stop_workers([iterator])


def start_workers(loader: DataLoader) -> Iterator:
    """iter(loader) with signals blocked until the workers have reached `ignore_signals`."""
    others = multiprocessing.active_children()
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if loader.num_workers and context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # starting it unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        iterator = iter(loader)
    except BaseException:  # e.g. from a signal handler between two workers
        for worker in set(multiprocessing.active_children()).difference(others):
            worker.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    STARTED.add(iterator)
    atexit.unregister(stop_workers)
    atexit.register(stop_workers)  # to run before torch's handler, which waits 5 s per worker
    return iterator


def ignore_signals(worker_id: int) -> None:
    """Ignore signals to the process group, so that the parent can still load and save."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def stop_workers(iterators: Iterable[object] = STARTED) -> None:
    """Stop the workers of DataLoader iterators now, by default of all: at exit, multiprocessing
    would send one SIGTERM, which they ignore, and wait forever.

    Deleting the last reference does the same, but a kept traceback holds a reference.
    """
    for iterator in list(iterators):
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turn torch's error for a dead worker into a DataError with advice. Wrap all code that runs
    while workers are alive: torch raises from a signal handler, at any line."""
    try:
        yield
    except RuntimeError as error:
        death = DEATH.fullmatch(str(error))
        if death is None:
            raise
        raise DataError(
            f"loader {death[1]} {death[2]}; if memory ran out, use fewer DATALOADER.WORKERS or a "
            "smaller DATALOADER.BSZ; with 0 workers an error in the data has its own traceback"
        ) from error
