"""Worker processes: how they start, which signals they leave to the parent, and how they end."""

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

from vil.data.batch import Batch
from vil.data.robust_dataset import RobustDataset
from vil.data.samplers import Position
from vil.utils.errors import DataError

SIGNALS = {
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
}
DEATH = re.compile(r"DataLoader (worker \(pid.*?\)) (.*?)\.?( Details are lost.*)?\s*", re.DOTALL)


def build_data_loader(
    samples: RobustDataset,
    batches: Iterable[list[Position]],
    *,
    workers: int,
    pin_memory: bool,
    context: str | None,
    persistent: bool = False,
) -> DataLoader:
    """A DataLoader over lists of Position that leaves the global generators alone.

    torch gives every worker one thread. Its own generator only seeds workers, where every sample
    is seeded again.
    """
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=samples.dataset.collate,
        pin_memory=pin_memory,
        worker_init_fn=ignore_signals,
        multiprocessing_context=context if workers else None,
        persistent_workers=persistent and workers > 0,
        generator=torch.Generator(),
    )


def start(loader: DataLoader) -> Iterator[Batch]:
    """iter(loader), whose workers are born with signals held back.

    Until `ignore_signals` they would be killed by one, or run the parent's handler.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    others = multiprocessing.active_children()
    way = loader.multiprocessing_context or multiprocessing.get_context()
    if loader.num_workers and way.get_start_method() != "fork":
        resource_tracker.ensure_running()  # its start lets signals through again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return iter(loader)
    except BaseException:  # the parent's own handler may raise between two workers
        for worker in set(multiprocessing.active_children()).difference(others):
            worker.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore_signals(worker_id: int) -> None:
    """A signal to the whole job must not take the data away from a parent that wants to save.

    The first SIGTERM is survived, the second is not, so that a stuck worker can still be ended.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def iter_batches(iterator: Iterator[Batch]) -> Iterator[Batch]:
    """The iterator's batches. RuntimeError, with the worker's id, when a worker has died.

    Its sockets close before its parent is told: torch's SIGCHLD handler raises during the sleep.
    """
    try:
        yield from iterator
    except (ConnectionError, EOFError):
        time.sleep(1)
        raise


@contextmanager
def worker_errors() -> Iterator[None]:
    """DataError, which says what to try, where torch says that a worker has died.

    To be put around all that goes on while there are workers: torch says it from the handler of a
    signal, on whatever line the main thread is.
    """
    try:
        yield
    except RuntimeError as error:
        death = DEATH.fullmatch(str(error))
        if death is None:
            raise
        raise DataError(
            f"loader {death[1]} {death[2]}; if memory ran out, take fewer DATALOADER.WORKERS or a "
            "smaller DATALOADER.BSZ; with 0 workers an error of the data shows its own lines"
        ) from error


def stop_workers(iterator: object) -> None:
    """End a DataLoader iterator's workers now.

    Dropping the last reference does the same, but a traceback that somebody keeps is a reference.
    """
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def stop_at_exit(iterator: object) -> None:
    """Also end them when the program ends by an error outside of our reach.

    multiprocessing would send one SIGTERM, which they survive, and wait for ever. To be called
    after the start of the workers: exit handlers run in reverse, and torch's own wait 5 s a worker.
    """
    reference = weakref.ref(iterator)
    atexit.register(lambda: stop_workers(reference()))
