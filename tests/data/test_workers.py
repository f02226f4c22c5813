"""Worker processes: signals, death, and no process left behind."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch
from PIL import Image
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader

from vil.data import batch, build_dataset, workers
from vil.data.datasets.image_list import ImageList, ImageSource, iter_image_batches
from vil.data.loader import TrainLoader
from vil.data.transforms import eval_transform
from vil.data.workers import worker_errors
from vil.utils.errors import DataError

# Loads five more batches after a SIGTERM to the process group, then fails with workers alive.
SCRIPT = """
import atexit, multiprocessing, signal, time
from vil.data import build_dataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.transforms import eval_transform
# registered first, so that it runs last
atexit.register(lambda: print(len(multiprocessing.active_children()), "alive at exit"))
dataset = build_dataset("fake", "", "train", eval_transform(8), n=64, size=8)
evaluation = iter(EvalLoader(dataset, batch_size=8, workers=1))
next(evaluation)
batches = TrainLoader(dataset, batch_size=8, workers=2).batches(0, 1000)
next(batches)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
print("ready", *[child.pid for child in multiprocessing.active_children()], flush=True)
while not stopped:
    time.sleep(0.01)
for _ in range(5):
    next(batches)
next(evaluation)
print("saved", flush=True)
raise RuntimeError("uncaught")
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_workers_survive_a_signal_to_the_process_group():
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ready, *children = process.stdout.readline().split()
    assert ready == "ready"
    assert len(children) == 3
    os.killpg(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=300)
    assert output == "saved\n0 alive at exit\n"
    assert "uncaught" in errors
    assert process.returncode == 1
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]


def loader(**options):
    dataset = build_dataset("fake", "", "train", eval_transform(8), n=64, size=8)
    return TrainLoader(dataset, batch_size=8, workers=2, **options)


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="patches the children")
def test_a_worker_survives_a_signal_while_it_starts(monkeypatch):
    parent, set_threads = os.getpid(), torch.set_num_threads

    def signalled(count):  # torch's worker calls it before worker_init_fn
        if os.getpid() != parent:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                os.kill(os.getpid(), number)
        set_threads(count)

    monkeypatch.setattr(torch, "set_num_threads", signalled)
    with worker_errors():
        assert len(list(loader().batches(0, 8))) == 8


def test_closing_the_batches_stops_their_workers():
    others = set(multiprocessing.active_children())
    batches = loader().batches(0, 1000)
    next(batches)
    assert len(set(multiprocessing.active_children()) - others) == 2
    batches.close()
    assert set(multiprocessing.active_children()) == others


def test_a_worker_that_dies_is_named():
    others = set(multiprocessing.active_children())
    batches = loader().batches(0, 1000)
    next(batches)
    victim = (set(multiprocessing.active_children()) - others).pop()
    os.kill(victim.pid, signal.SIGKILL)
    message = f"pid.* {victim.pid}.*DATALOADER"
    with pytest.raises(DataError, match=message) as caught, worker_errors():
        for _ in batches:
            pass
    assert set(multiprocessing.active_children()) == others, caught  # which keeps the traceback


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="patches the children")
@pytest.mark.parametrize("kind", ["train", "images"])
def test_a_full_shared_memory_changes_no_sample(monkeypatch, kind, tmp_path):
    """Docker gives 64 MiB; a pickled tensor that does not fit would be lost, and waited for."""

    def load(number):
        if kind == "train":
            return [(b.images.to_float() if hasattr(b.images, "to_float") else b.images, b.targets)
                    for b in loader().batches(0, 4)]  # fmt: skip
        images = ImageList([ImageSource(str(file)) for file in sorted(tmp_path.glob("*.png"))])
        options = dict(batch_size=2, workers=number, pin_memory=False)
        batches = iter_image_batches(images, eval_transform(8), **options)
        return [sample[:1] for batch in batches for sample in batch.samples]

    for number in range(4):
        Image.new("RGB", (9, 9), (60 * number, 10, 10)).save(tmp_path / f"{number}.png")
    expected = load(0)

    def full(*args, **kwargs):
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(reductions, "reduce_storage", full)
    monkeypatch.setattr(batch, "default_collate", full)
    found = load(2)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_workers_that_cannot_start_are_reported(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DataLoader, "_get_iterator", full)
    with pytest.raises(DataError, match="/dev/shm is full.*DATALOADER.WORKERS to 0"):
        next(loader().batches(0, 1))


@pytest.mark.parametrize(
    ("setting", "device", "processes", "count"),
    [
        (3, "cuda", 1, 3),
        (0, "cpu", 1, 0),
        (-1, "cuda", 1, 15),
        (-1, "cuda", 4, 3),
        (-1, "cpu", 1, 2),
    ],
)
def test_minus_one_counts_workers_from_cores(monkeypatch, setting, device, processes, count):
    monkeypatch.setattr(workers, "usable_cores", lambda: 16)
    assert workers.count_workers(setting, torch.device(device), processes) == count
