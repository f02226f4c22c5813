"""The scripts that start training: they run anywhere, pass everything on, say how they are used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.small_runs import FAKE, SMALL, checkpoint, environment, metrics
from vil.config import get_config

pytestmark = pytest.mark.long

SCRIPTS = Path(__file__).parents[2] / "scripts"
# What ImageNet's recipes need to shrink to two stages on 32-px images.
TINY = (
    *SMALL, *FAKE, "DATALOADER.WORKERS=0", "SOLVER.WARMUP_EPOCHS=0", "OPTIM.EPOCHS=1",
    "AMP.ENABLED=False", "MODEL.VIT.MSVIT.MODE=0",
)  # fmt: skip


def start(folder, script, *words, **environ) -> subprocess.CompletedProcess:
    """The script in `folder`, with this Python's environment first on PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [SCRIPTS / script, *map(str, words)], env=environment(PATH=path, **environ), cwd=folder,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run by train_1gpu.sh: config and data by position, the rest passed on."""
    root = tmp_path_factory.mktemp("one")
    ended = start(root, "train_1gpu.sh", "imagenet/vil_tiny_rpb.yaml", ".", *TINY, OUT="runs/here")
    assert ended.returncode == 0, ended.stderr
    return root / "runs/here"


def test_one_process_trains(run):
    assert "ranks 1" in (run / "env.txt").read_text()
    assert len(metrics(run, "train")) == 4
    cfg = get_config(run / "config.yaml")
    assert (cfg.DATALOADER.BSZ, cfg.OPTIM.WD) == (16, 0.1)  # the command line's, the config's


def test_several_processes_train(tmp_path):
    """Config and data from the environment; the folder's name is the config's."""
    given = {"CONFIG": "imagenet/vil_small.yaml", "DATA": str(tmp_path), "NPROC": "2"}
    ended = start(tmp_path, "train_8gpu.sh", *TINY, "--seed", "3", **given)
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "runs/vil_small"
    assert "ranks 2" in (folder / "env.txt").read_text()
    assert get_config(folder / "config.yaml").SEED == 3


def test_fine_tuning_starts_from_the_weights(run, tmp_path):
    """A run's folder as weights; the head has other classes, so it must start afresh."""
    words = ("imagenet/vil_medium_deep_384_rpb.yaml", run, tmp_path, "tuned", *TINY)
    classes = ("DATA.NUM_CLASSES=3", "DATA.KWARGS.num_classes=3", "FINETUNE.HEAD", "new")
    ended = start(tmp_path, "finetune_384.sh", *words, *classes, NPROC="1")
    assert ended.returncode == 0, ended.stderr
    assert f"weights of {run}" in (tmp_path / "tuned/log.txt").read_text()
    assert get_config(tmp_path / "tuned/config.yaml").FINETUNE.FINETUNE
    assert checkpoint(tmp_path / "tuned")


@pytest.mark.parametrize("words", [("--output_dir", "run"), ("--output=run",)])
def test_a_job_with_a_saved_checkpoint_is_requeued(words, tmp_path):
    """SLURM's commands are replaced; srun leaves what a preempted run leaves."""
    saved = 'mkdir run; echo "\\"code\\": 75" > run/status.json; touch -d "1 hour" run/status.json'
    for name, text in (("scontrol", "echo scontrol $*"), ("srun", f"{saved}; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = dict(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="a", SLURM_JOB_NUM_NODES="1")
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        [SCRIPTS / "train_slurm.sh", *words], cwd=tmp_path, capture_output=True, text=True,
        env=environment(PATH=path, SLURM_SUBMIT_DIR=str(tmp_path), **job), timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stdout.endswith("scontrol requeue 7\n")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("train_1gpu.sh", ()),
        ("train_8gpu.sh", ("imagenet/vil_tiny.yaml", "nowhere", "OPTIM.LR", "1e-3")),
        ("train_8gpu.sh", ("--resume",)),
        ("finetune_384.sh", ("imagenet/vil_tiny.yaml", "weights.pth", ".")),
        ("finetune_384.sh", ("imagenet/vil_tiny.yaml", "weights.pth", ".", "out")),
    ],
)
def test_what_is_missing_is_answered_with_the_usage(script, words, tmp_path):
    ended = start(tmp_path, script, *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "CONFIG" in ended.stderr
    assert not any(tmp_path.iterdir())
