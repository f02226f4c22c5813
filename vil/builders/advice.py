"""Suggest other numbers of data loader workers and CPU threads for a slow run."""

import torch
from yacs.config import CfgNode

from vil.data.workers import MAX_WORKERS, count_workers
from vil.engine.distributed import DistInfo, local_ranks
from vil.utils.machine import CpuTime, idle_cores, read_cpu_time, usable_cores

MARGIN = 0.75  # cores by which threads may exceed the idle cores


def data_advice(cfg: CfgNode, device: torch.device, dist: DistInfo, idle: float) -> str:
    """Return a sentence that advises how to load data faster, for a run whose training steps wait
    for data. idle: number of idle CPU cores."""
    workers = count_workers(cfg.DATALOADER.WORKERS, device, local_ranks(dist))
    more = min(max(int(idle) // local_ranks(dist) - 1, 1), MAX_WORKERS)
    if more > workers:
        return f"try DATALOADER.WORKERS {more} instead of {workers}"
    return (
        f"more than DATALOADER.WORKERS {workers} would not help with {idle:.1f} idle cores: store "
        "smaller images, or use fewer augmentations"
    )


def thread_advice(device: torch.device, dist: DistInfo, idle: float) -> str:
    """Return a sentence that advises fewer threads, if torch uses more threads than there are idle
    cores. Otherwise, and always on a GPU, return "".

    idle: number of idle CPU cores.
    """
    threads, ranks = torch.get_num_threads(), local_ranks(dist)
    better = max(round(idle) // ranks, 1)
    if device.type != "cpu" or better >= threads or threads * ranks <= idle + MARGIN:
        return ""
    count = f"{threads} threads" if ranks == 1 else f"{ranks} processes of {threads} threads"
    return (
        f"torch uses {count}, but only about {idle:.1f} of {usable_cores()} cores are idle: if "
        f"steps are slow, set OMP_NUM_THREADS={better}"
    )


def count_idle_cores(dist: DistInfo, since: CpuTime | None) -> float:
    """Return how many CPU cores other programs have left idle, on average, since the run started.

    With several ranks, returns the number of all usable cores, because the other ranks would count
    as other programs. since: `read_cpu_time()` at the start of the run.
    """
    return idle_cores(since, read_cpu_time()) if dist.world == 1 else float(usable_cores())
