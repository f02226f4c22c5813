"""Ranks end with their launcher."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.common.small_runs import TINY, environment, free_port, metrics

pytestmark = pytest.mark.trust(7)

WORDS = (*TINY, "OPTIM.EPOCHS=400", "DATALOADER.WORKERS=0")


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def has_steps(run):
    return lambda: (run / "metrics.jsonl").exists() and len(metrics(run, "train")) > 4


@pytest.mark.long
def test_ranks_end_with_their_launcher(tmp_path):
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                f"--master_port={free_port()}", "-m", "vil"]  # fmt: skip
    words = [*launcher, "train", "--output_dir", str(run), *WORDS]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    wait_for(has_steps(run), 120)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    try:
        wait_for(lambda: not any(alive(rank) for rank in ranks))
    finally:
        for rank in filter(alive, ranks):
            os.kill(rank, signal.SIGKILL)
    assert (run / "checkpoints/last").exists()


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
