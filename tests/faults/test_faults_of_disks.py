"""Real runs on a full or failing disk."""

import contextlib
import shutil
import subprocess
import time

import pytest

from tests.common.faults.real_runs import (
    begin,
    finish,
    said,
    saved_step,
    variants,
    wait_until,
)
from tests.common.faults.same_runs import assert_same_end
from tests.common.small_runs import TINY
from vil.engine.checkpoint.save_load import newest_valid

WORDS = (*TINY, "OPTIM.EMA=0.9", "RUN.SAVE_STEPS=1", "RUN.KEEP=9", "SOLVER.LR_POLICY=")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of eight steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(folder, *WORDS)
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


def test_a_real_run_without_a_byte_left(small_disk, tmp_path):
    """From the third epoch on, neither checkpoints nor the log can be written: the run trains to
    its end and, once resumed, ends like the uninterrupted run."""
    longer = ("OPTIM.EPOCHS=20", "RUN.KEEP=1", "RUN.MAX_FAILED_SAVES=99")
    folder, unbroken, ballast = small_disk, tmp_path / "unbroken", small_disk / "ballast"
    finish(unbroken, *WORDS, *longer)
    process = begin(folder, *WORDS, *longer)
    wait_until(lambda: saved_step(folder) >= 12, process, folder)
    while process.poll() is None:  # what a save that failed gives back is taken, too
        fill_up(ballast)
        time.sleep(0.005)
    text = said(folder)
    assert "train epoch 20.00/20 eta 0:00:00 " in text
    assert "the log cannot be written" in text
    assert process.returncode == 4
    assert "checkpoint of step 80 was not written" in text
    assert newest_valid(folder / "checkpoints") is not None
    ballast.unlink()
    finish(folder, *WORDS, *longer, "--resume")
    assert_same_end(folder, unbroken)


@pytest.mark.parametrize(
    ("fault", "is_told"),
    variants(
        [
            ({"what": "rename", "times": 1, "seconds": 0.02}, False),  # it is slow, and tried again
            ({"what": "fsync", "times": 6}, True),
            ({"what": "rename", "times": 4}, True),
            ({"what": "fsync", "seconds": 0.02}, False),
        ],
        2,
    ),
    ids=str,
)
def test_a_real_run_on_a_failing_disk(whole, fault, is_told, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for last in sorted((folder / "checkpoints").glob("step-*"))[4:]:
        shutil.rmtree(last)
    finish(folder, *WORDS, "--resume", fault=fault)
    assert ("was not written" in said(folder)) == is_told
    assert_same_end(folder, whole)
