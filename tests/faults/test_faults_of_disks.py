"""Real runs that are killed while saving, find corruption, or have a full or failing disk."""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.common.faults.real_runs import begin, end_all, said, saved_step, status, wait_for_end
from tests.common.faults.records import record, repeats
from tests.common.faults.same_runs import equal_digests
from tests.common.small_runs import TINY, checkpoint
from vil.engine.checkpoint.save_load import find_corruption, newest_valid

WORDS = (*TINY, "OPTIM.EMA=0.9", "RUN.SAVE_STEPS=1", "RUN.KEEP=9", "SOLVER.LR_POLICY=")
DIGESTS = 4
DISK = str(Path(__file__).parents[1] / "common/faults/injected_disk.py")


def finished(folder, *words, **environ) -> bool:
    process = begin(folder, *WORDS, *words, **environ)
    wait_for_end(process)
    return process.returncode == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of eight steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert finished(folder), said(folder)
    return folder


def test_f1_real_runs_killed_while_they_save(whole, tmp_path):
    draw, same, count = random.Random(1), 0, repeats(5)
    for number in range(count):
        folder = tmp_path / str(number)
        process = begin(folder, *WORDS)
        while saved_step(folder) < 1 + number:
            assert process.poll() is None, said(folder)
            time.sleep(0.001)
        time.sleep(0.05 * draw.random())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        end_all(process)
        same += finished(folder, "--resume") and equal_digests(folder, whole) == DIGESTS
    what = f"runs that save at every step and end like the uninterrupted run (of {count})"
    record("F1", what, same, count)


def test_f9_real_runs_whose_newest_checkpoint_is_damaged(whole, tmp_path):
    draw, same = random.Random(2), 0
    for number, file in enumerate(sorted(p.name for p in checkpoint(whole).iterdir())):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        damaged = checkpoint(folder) / file
        data = bytearray(damaged.read_bytes())
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
        damaged.write_bytes(data[:place] if number % 2 else data)
        back = finished(folder, "--resume") and "step-00000008 skipped" in said(folder)
        same += back and equal_digests(folder, whole) == DIGESTS
    name = (
        "runs with a corrupt file that resume one checkpoint earlier and end like the "
        "uninterrupted run"
    )
    record("F9", f"{name} (of {number + 1})", same, number + 1)


def test_f10_real_runs_on_a_full_disk(whole, tmp_path):
    """Runs continue for four steps, with files limited to a fraction of a checkpoint's size."""
    longer = ("--resume", "OPTIM.EPOCHS=3")
    unbroken = tmp_path / "unbroken"
    shutil.copytree(whole, unbroken)
    assert finished(unbroken, *longer), said(unbroken)
    size = (checkpoint(whole) / "state.pt").stat().st_size
    limits, same = resource.getrlimit(resource.RLIMIT_FSIZE), 0
    for number, part in enumerate((0.5, 0.7, 0.8, 0.9, 1.0)):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(part * size) - 1, limits[1]))
        try:
            process = begin(folder, *WORDS, *longer, "RUN.MAX_FAILED_SAVES=9")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        wait_for_end(process)
        went_on = "train epoch 3.00/3 step 12/12" in said(folder)
        told = "of step 9 was not written" in said(folder) and status(folder)["state"] == "failed"
        valid = saved_step(folder) == 8 and find_corruption(checkpoint(folder)) is None
        again = finished(folder, *longer) and equal_digests(folder, unbroken) == DIGESTS
        same += went_on and told and valid and again
    name = (
        "runs that continue, keep their checkpoint, and once resumed end like the uninterrupted "
        "run (of 5)"
    )
    record("F10", name, same, 5)


@pytest.fixture
def small_disk(tmp_path):
    """A run folder on a file system of 4 MB, which needs root."""
    place = tmp_path / "run"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill_up(ballast):
    """Write to a file until its disk is full."""
    with contextlib.suppress(OSError), open(ballast, "ab", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass


def test_f10_a_real_run_without_a_byte_left(small_disk, tmp_path):
    """From the third epoch on, neither checkpoints nor the log can be written."""
    longer = ("OPTIM.EPOCHS=20", "RUN.KEEP=1", "RUN.MAX_FAILED_SAVES=99")
    folder, unbroken, ballast = small_disk, tmp_path / "unbroken", small_disk / "ballast"
    assert finished(unbroken, *longer), said(unbroken)
    process = begin(folder, *WORDS, *longer)
    while saved_step(folder) < 12:
        assert process.poll() is None, said(folder)
        time.sleep(0.001)
    while process.poll() is None:  # what a save that failed gives back is taken, too
        fill_up(ballast)
        time.sleep(0.005)
    text = said(folder)
    went_on = "train epoch 20.00/20 step 80/80" in text and "the log cannot be written" in text
    stopped = process.returncode == 4 and "checkpoint of step 80 was not written" in text
    valid = newest_valid(folder / "checkpoints") is not None
    ballast.unlink()
    again = finished(folder, *longer, "--resume") and equal_digests(folder, unbroken) == DIGESTS
    found = [went_on, stopped, valid, again]
    name = (
        "no space even for the log: a run trains to its end, and once resumed ends like the "
        "uninterrupted run"
    )
    record("F10", name, found == [True] * 4, True)


FAULTS = (
    {"what": "rename", "times": 1},
    {"what": "rename", "times": 4},
    {"what": "fsync", "times": 1},
    {"what": "fsync", "times": 6},
    {"what": "fsync", "seconds": 0.02},
)


def test_f31_real_runs_on_a_failing_disk(whole, tmp_path):
    same = 0
    for number, fault in enumerate(FAULTS):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        for last in sorted((folder / "checkpoints").glob("step-*"))[4:]:
            shutil.rmtree(last)
        environ = {"FAULT": str(fault).replace("'", '"')}
        ended = finished(folder, "--resume", "--import", DISK, **environ)
        told = "was not written" in said(folder)
        same += ended and equal_digests(folder, whole) == DIGESTS and told == (number in (1, 3))
    record("F31", "runs that end like the undisturbed run (of 5)", same, 5)
