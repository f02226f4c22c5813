"""Start and stop the worker processes of DataLoaders, and handle their signals and errors."""

import atexit
import errno
import multiprocessing
import re
import signal
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler as reduction
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vil.data.robust_dataset import RobustDataset
from vil.data.samplers import Position
from vil.utils.errors import DataError
from vil.utils.machine import usable_cores

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
STARTED = weakref.WeakSet()  # DataLoader iterators whose workers are stopped at exit
# If the constructor of this class fails, `__del__` would print a traceback because it does not find
# this attribute, which the constructor sets for each object.
_MultiProcessingDataLoaderIter._shutdown = True  # pyrefly: ignore[no-access]
MAX_WORKERS = 16  # chosen for a loader
DEATH = re.compile(r"DataLoader (worker \(pid.*?\)) (.*?)\.?( Details are lost.*)?\s*", re.DOTALL)


def count_workers(setting: int, device: torch.device, processes: int = 1) -> int:
    """Return the number of worker processes of a loader.

    setting: the number, or -1 to choose it: for a GPU, the cores of this machine divided among its
    training processes, at most MAX_WORKERS. For a CPU, which needs its cores itself, at most two.
    processes: training processes on this machine.
    """
    if setting >= 0:
        return setting
    cores = usable_cores()
    if device.type == "cpu":
        return min(cores, 2)
    return max(1, min(cores // processes - 1, MAX_WORKERS))


def build_data_loader(
    samples: RobustDataset,
    batches: Iterable[list[Position]],
    *,
    workers: int = 0,
    pin_memory: bool = False,
    context: str | None = None,
    persistent: bool = False,
) -> DataLoader:
    """Build a DataLoader for given batches of samples.

    batches: for each batch, the list of its samples, each as a `Position`. workers: number of
    worker processes; 0 to load in this process. context: start method of the workers, such as
    "spawn"; None for the default. persistent: keep the workers for the next pass over the batches.
    """
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=samples.collate,
        pin_memory=pin_memory,
        worker_init_fn=init_worker,
        multiprocessing_context=context if workers else None,
        persistent_workers=persistent and workers > 0,
        generator=torch.Generator(),  # keeps the global one unchanged; `fork_rng` seeds samples
    )


def iter_batches(loader: DataLoader) -> Generator[Any, None, None]:
    """Yield all batches of a DataLoader once. Closing this iterator stops the workers unless they
    are persistent. If a worker dies, raises RuntimeError with its process id."""
    iterator = start_workers(loader)
    try:
        yield from iterator
    except (ConnectionError, EOFError):
        # The connection to a dead worker may fail before SIGCHLD arrives. torch's signal handler
        # knows the process id: wait for it to raise.
        time.sleep(1)
        raise
    finally:
        if not loader.persistent_workers:
            stop_workers([iterator])


def start_workers(loader: DataLoader) -> Iterator:
    """Start the workers of a loader and return iter(loader). During the start, the signals in
    SIGNALS are blocked, so that no worker receives one before it runs `ignore_signals`. Raises
    DataError if the system cannot start them, for example because /dev/shm is full."""
    others = multiprocessing.active_children()
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if loader.num_workers and context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # starting it unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        iterator = iter(loader)
    except BaseException as error:  # e.g. raised by a signal handler
        for worker in set(multiprocessing.active_children()).difference(others):
            worker.kill()
        if loader.num_workers and isinstance(error, OSError):
            reason = error.strerror or error
            where = " (/dev/shm is full)" if error.errno == errno.ENOSPC else ""
            raise DataError(
                f"the DataLoader processes cannot start: {reason}{where}: set DATALOADER.WORKERS "
                "to 0, or free this resource"
            ) from error
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    STARTED.add(iterator)
    atexit.unregister(stop_workers)
    atexit.register(stop_workers)  # to run before torch's handler, which waits 5 s per worker
    return iterator


def init_worker(worker_id: int) -> None:
    """Set up a loader worker. DataLoader calls this function as its worker_init_fn."""
    ignore_signals(worker_id)
    reduction.register(torch.UntypedStorage, share_or_copy)


def share_or_copy(storage: torch.UntypedStorage) -> tuple:
    """Pickle a tensor's storage for the main process: by its name in shared memory or, if shared
    memory is full, as a copy of its bytes. Docker limits /dev/shm to 64 MiB by default."""
    try:
        return reductions.reduce_storage(storage)
    except RuntimeError:  # of torch: unable to allocate shared memory
        content = torch.empty(0, dtype=torch.uint8).set_(storage)
        return restore_storage, (content.numpy().tobytes(),)


def restore_storage(data: bytes) -> torch.UntypedStorage:
    """Return a new storage with the given bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()


def ignore_signals(worker_id: int) -> None:
    """Make a worker process ignore SIGNALS, except that a second SIGTERM ends it.

    Workers thus survive a signal to the whole process group, so that the main process can still
    load data and save a checkpoint.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def stop_workers(iterators: Iterable[object] = STARTED) -> None:
    """Stop the workers of the given DataLoader iterators. The default is all iterators that
    `start_workers` returned.

    This function runs at exit. Without it, multiprocessing would send one SIGTERM to each worker
    and wait forever for the worker to end, because workers ignore the first SIGTERM.
    """
    for iterator in list(iterators):
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turn torch's RuntimeError for a dead worker into a DataError with advice.

    All code that runs while workers are alive must be inside this `with` block. torch raises the
    error from a signal handler, which can interrupt the code at any line.
    """
    try:
        yield
    except RuntimeError as error:
        death = DEATH.fullmatch(str(error))
        if death is None:
            raise
        raise DataError(
            f"a DataLoader process died: {death[1]} {death[2]}. If memory ran out, reduce "
            "DATALOADER.WORKERS or DATALOADER.BSZ. Otherwise, set DATALOADER.WORKERS to 0 to "
            "see the traceback"
        ) from error
