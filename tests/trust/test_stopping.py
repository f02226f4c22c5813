"""Ranks end with their launcher."""

import subprocess
import sys

import pytest

from tests.common.small_runs import TINY, environment, free_port

WORDS = (*TINY, "OPTIM.EPOCHS=400", "DATALOADER.WORKERS=0")


@pytest.mark.long
@pytest.mark.trust(7)
def test_ranks_end_with_their_launcher(tmp_path):
    """The ranks hold the pipe, so that it ends when the last of them does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                f"--master_port={free_port()}", "-m", "vil"]  # fmt: skip
    words = [*launcher, "train", "--output_dir", str(tmp_path / "run"), *WORDS]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "val epoch 1" in line:
                break
        process.kill()
        process.communicate(timeout=300)
    assert (tmp_path / "run/checkpoints/last").exists()
