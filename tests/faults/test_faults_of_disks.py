"""Real runs on a full or failing disk."""

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.common.faults.real_runs import begin, said, saved_step, wait_for_end
from tests.common.faults.records import record
from tests.common.faults.same_runs import equal_digests
from tests.common.small_runs import TINY
from vil.engine.checkpoint.save_load import newest_valid

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
