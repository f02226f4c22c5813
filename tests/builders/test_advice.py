"""Hints about loader workers and threads."""

import pytest
import torch

from vil.builders.advice import data_advice, thread_advice
from vil.config import get_config
from vil.engine.distributed import DistInfo
from vil.utils.machine import CpuTime, idle_cores, read_cpu_time, usable_cores

pytestmark = pytest.mark.smoke
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("workers", "idle", "says"),
    [
        (0, 1.0, "DATALOADER.WORKERS 1 instead of 0"),
        (2, 8.0, "DATALOADER.WORKERS 7 instead of 2"),
        (0, 64.0, "DATALOADER.WORKERS 16 instead of 0"),
        (1, 2.0, "store smaller images"),
        (16, 64.0, "store smaller images"),
    ],
)
def test_more_workers_are_suggested_while_cores_are_idle(workers, idle, says):
    cfg = get_config(None, [f"DATALOADER.WORKERS={workers}"])
    assert says in data_advice(cfg, CPU, DistInfo(), idle)


@pytest.mark.parametrize(
    ("threads", "idle", "says"),
    [
        (2, 2.0, ""),
        (2, 1.4, ""),
        (2, 1.0, "OMP_NUM_THREADS=1"),
        (8, 2.6, "OMP_NUM_THREADS=3"),
        (1, 0.1, ""),
    ],
)
def test_fewer_threads_are_suggested_if_cores_are_busy(threads, idle, says, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = thread_advice(CPU, DistInfo(), idle)
    assert says in found
    assert bool(found) == bool(says)
    assert thread_advice(torch.device("cuda"), DistInfo(), idle) == ""


def test_the_ranks_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = thread_advice(CPU, DistInfo(0, 4, 0), 8.0)
    assert "4 processes of 8 threads" in found
    assert "OMP_NUM_THREADS=2" in found
    cfg = get_config(None, ["DATALOADER.WORKERS=0"])
    assert "DATALOADER.WORKERS 1 instead" in data_advice(cfg, CPU, DistInfo(0, 4, 0), 8.0)


def test_idle_cores_leave_out_what_others_use():
    cores = usable_cores()
    assert cores >= 1
    start = CpuTime(100.0, 50.0, 20.0)
    assert idle_cores(start, CpuTime(110.0, 60.0, 30.0)) == cores  # all of it is ours
    busy = idle_cores(start, CpuTime(110.0, 50.0 + 10 * 10_000, 20.0))
    assert busy == 0
    assert idle_cores(start, CpuTime(100.1, 99.0, 20.0)) == cores  # too short to tell
    assert idle_cores(None, None) == cores


def test_cpu_time_increases():
    first = read_cpu_time()
    if first is None:
        pytest.skip("no /proc/stat")
    sum(range(10**6))
    second = read_cpu_time()
    assert second.wall > first.wall
    assert second.total >= first.total > 0
    assert second.own >= first.own > 0
