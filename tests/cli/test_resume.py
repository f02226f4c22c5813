"""Stopped twice in the middle of an epoch and resumed twice, a run ends as if nothing had happened.

With everything on that draws random numbers: random shift, dropout, drop path, mixup, cutmix,
RandAugment, random erasing, crops and flips.
"""

import os
import shutil
import signal

import pytest
import torch

from tests.common.small_runs import TINY, checkpoint, figures, metrics, succeeds, vil
from vil.engine import loop

END, STOPS = 16, (3, 9)  # steps: two epochs of eight
EVERYTHING = (
    *TINY, "DATALOADER.BSZ=8", "OPTIM.OPT=adamw", "OPTIM.LR=1e-3", "OPTIM.EMA=0.9",
    "SOLVER.LR_POLICY=cosine", "SOLVER.WARMUP_EPOCHS=1", "SEED=3", "DATALOADER.WORKERS=0",
    "MODEL.VIT.MSVIT.MODE=1", "MODEL.VIT.MSVIT.VIL_MODE_SWITCH=0.75", "MODEL.VIT.DROP=0.1",
    "MODEL.VIT.DROP_PATH=0.3", "AUG.MIXUP_PROB=0.8", "AUG.MIXUP=0.8", "AUG.MIXCUT=1.0",
    "AUG.TIMM_AUG.USE_TRANSFORM=True", "AUG.TIMM_AUG.RE_PROB=0.5", "LOSS.LABEL_SMOOTHING=0.1",
    "AUG.TIMM_AUG.AUTO_AUGMENT=rand-m9-mstd0.5-inc1",
)  # fmt: skip
OTHER_ARCH = "MODEL.VIT.MSVIT.ARCH=l1,h1,d16,n2,s1,g1,p4,f3,a0"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(an uninterrupted run, one that SIGTERM stopped twice and that was resumed)."""
    root = tmp_path_factory.mktemp("runs")
    whole, stopped = root / "whole", root / "stopped"
    succeeds("train", *EVERYTHING, "--output_dir", whole)
    for stop in STOPS:

        def seed_step(seed, step, rank, plain=loop.seed_step, stop=stop):
            if step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            plain(seed, step, rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "seed_step", seed_step)
            ended = vil("train", *EVERYTHING, "--output_dir", stopped, "--resume")
        assert ended.code == 75, ended.err
    succeeds("train", *EVERYTHING, "--output_dir", stopped, "--resume")
    return whole, stopped


@pytest.mark.defect("B7", "B24")
def test_a_resumed_run_ends_with_the_same_bits(runs):
    whole, stopped = (checkpoint(run) for run in runs)
    for name in ("model.safetensors", "ema.safetensors"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()
    ours, theirs = (torch.load(c / "state.pt", weights_only=True) for c in (stopped, whole))
    assert ours["state"] == theirs["state"]
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    for parameter, state in theirs["optimizer"].items():
        for slot, value in state.items():
            assert torch.equal(ours["optimizer"][parameter][slot], value)


def test_every_step_is_logged_once_and_alike(runs):
    whole, stopped = map(metrics, runs)
    assert figures(stopped) == figures(whole)
    assert [m["step"] for m in stopped if m["split"] == "train"] == list(range(1, END + 1))


def contents(folder):
    """{file: bytes}, without what every start writes to."""
    files = [file for file in folder.rglob("*") if file.name not in ("run.lock", "log.txt")]
    return {file: file.read_bytes() for file in files if file.is_file()}


def test_a_finished_run_has_nothing_to_do(runs):
    before = contents(runs[0])
    shown = succeeds("train", *EVERYTHING, "--output_dir", runs[0], "--resume")
    assert f"nothing to do: {END} of {END} steps are done" in shown
    assert contents(runs[0]) == before


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "already holds a run: add --resume"),
        (["--resume", "DATALOADER.BSZ=16"], 4, "was started with DATALOADER.BSZ 8 (now 16)"),
        (["--resume", "DATA.KWARGS.n=72"], 4, "steps_per_epoch 8, this run has 9"),
        (["--resume", "OPTIM.OPT=sgd"], 4, "was started with OPTIM.OPT 'adamw' (now 'sgd')"),
        (["--resume", OTHER_ARCH], 4, "was started with MODEL.VIT.MSVIT.ARCH"),
        (["--resume", OTHER_ARCH, "RUN.ALLOW_CHANGES=True"], 4, "another model"),
    ],
)
def test_a_refused_resume_leaves_the_run_unchanged(runs, words, code, message):
    before = contents(runs[0])
    ended = vil("train", *EVERYTHING, "--output_dir", runs[0], *words)
    assert ended.code == code
    assert message in ended.err
    assert contents(runs[0]) == before


def test_a_run_can_be_made_longer(runs, tmp_path):
    """More epochs from the current weights; the log continues where it ended."""
    run = shutil.copytree(runs[1], tmp_path / "run", symlinks=True)
    succeeds("train", *EVERYTHING, "--output_dir", run, "--resume", "OPTIM.EPOCHS=3")
    assert [m["step"] for m in metrics(run, "train")] == list(range(1, 25))
