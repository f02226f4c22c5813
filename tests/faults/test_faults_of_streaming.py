"""Real `vil predict --stream` processes that are killed or lose their disk, and are restarted."""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.common.faults.real_runs import repeats
from tests.common.small_runs import command, environment

pytestmark = pytest.mark.faults

SIDE, KILLS, LIMIT = 1100, repeats(4), 300  # pixels, processes, seconds
USAGE, SAVE = 2, 4
DISK = 64  # MiB


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """An image, read through a map of the file."""
    path = tmp_path_factory.mktemp("image") / "image.npy"
    pixels = np.random.default_rng(0).integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)
    np.save(path, pixels)
    return path


def begin(image, folder: Path) -> subprocess.Popen:
    """Start the command with its scratch folder and its outputs in `folder`."""
    folder.mkdir(exist_ok=True)
    save = [f"--save=stages.{i}={folder / f'map{i}.npy'}" for i in range(3)]
    words = [
        "--scratch",
        folder / "scratch",
        "--format",
        "json",
        "--output-file",
        folder / "a.json",
    ]
    line = command("predict", image, "--stream", "--memory", "64MiB", *words, *save)
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(line, env=environment(), **pipes)


def end(process: subprocess.Popen) -> tuple[int, str]:
    """Wait for a process. Returns (exit code, last line of its errors)."""
    errors = process.communicate(timeout=LIMIT)[1]
    return process.returncode, (errors.splitlines() or [""])[-1]


def digests(folder: Path) -> dict[str, str]:
    files = [folder / "a.json", *(folder / f"map{i}.npy" for i in range(3))]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def wait_for_work(process: subprocess.Popen, folder: Path, name: str = "lock") -> None:
    """Wait until a process has a file of this name in its scratch folder."""
    until = time.monotonic() + LIMIT
    while not list(folder.glob(f"scratch/vil-stream-*/{name}")):
        assert process.poll() is None, end(process)
        assert time.monotonic() < until
        time.sleep(0.01)


@contextlib.contextmanager
def paused(process: subprocess.Popen) -> Iterator[None]:
    """Pause a process, so that the body runs in the middle of its work."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def undisturbed(image, tmp_path_factory):
    """(digests of the files of an undisturbed process, seconds of its work)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = begin(image, folder)
    wait_for_work(process, folder)
    began = time.monotonic()
    assert end(process)[0] == 0
    return digests(folder), time.monotonic() - began


def test_killed_at_random_moments(image, undisturbed, tmp_path):
    """Every second time as soon as there is a journal to resume from."""
    expected, seconds = undisturbed
    draw, kills = random.Random(0), 0
    while kills < KILLS:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        process = begin(image, folder)
        wait_for_work(process, folder)
        if kills % 2:
            time.sleep(draw.uniform(0, seconds))
        else:
            wait_for_work(process, folder, "journal.pt")
        process.kill()
        process.communicate()
        if process.returncode == 0:  # it had ended: the undisturbed one was slower
            seconds *= 0.8
            continue
        kills += 1
        assert end(begin(image, folder))[0] == 0
        assert digests(folder) == expected, kills
        assert not list((folder / "scratch").iterdir())


def test_another_process_in_the_folder(image, tmp_path):
    first = begin(image, tmp_path)
    wait_for_work(first, tmp_path)
    with paused(first):
        code, line = end(begin(image, tmp_path))
    assert code == USAGE
    assert "another process streams the same image" in line
    assert end(first)[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize("is_running", [False, True], ids=["before", "during"])
def test_a_full_disk(image, undisturbed, tmp_path, is_running):
    """The scratch folder is on a small file system. After space is freed, the work continues."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(scratch)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount")
    try:
        process = begin(image, tmp_path) if is_running else None
        if is_running:
            wait_for_work(process, tmp_path)
        with paused(process) if is_running else contextlib.nullcontext():
            fill(scratch)
        code, line = end(process or begin(image, tmp_path))
        if is_running:  # it may have allocated all its files before
            assert code == 0 or (code == SAVE and "No space left" in line), line
        else:
            assert code == USAGE, line
            assert "of free space" in line
        (scratch / "filler").unlink()
        assert end(begin(image, tmp_path))[0] == 0
        assert digests(tmp_path) == undisturbed[0]
    finally:
        subprocess.run(["umount", str(scratch)], check=True)


def fill(folder: Path) -> None:
    """Write a file until the disk is full."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
