"""A run that is stopped or killed, then restarted, ends with bitwise equal weights."""

import random

import pytest

from tests.common.faults.real_runs import ELASTIC, finish, variants
from tests.common.faults.same_runs import EVERYTHING, WITNESS, assert_same_end, miscounted, order
from tests.common.marks import cases
from tests.common.small_runs import figures, metrics, torchrun, vil
from tests.common.small_tasks import OTHERS, words_of

IMAGES, PER_EPOCH, EPOCHS = 96, 6, 5
END = PER_EPOCH * EPOCHS
LONG = (*EVERYTHING, f"DATA.KWARGS.n={IMAGES}", f"OPTIM.EPOCHS={EPOCHS}")
STRATEGIES = {"DDP": "DISTRIBUTED.STRATEGY=ddp", "FSDP2": "DISTRIBUTED.STRATEGY=fsdp"}
# All that draws in every task, with an average, accumulation, and checkpoints within epochs.
DRAWING = (
    "OPTIM.EPOCHS=4", "OPTIM.OPT=adamw", "OPTIM.LR=1e-3", "OPTIM.EMA=0.9", "OPTIM.CLIP_GRAD=1",
    "OPTIM.ACCUMULATE=2", "DATALOADER.BSZ=4", "MODEL.VIT.MSVIT.MODE=1", "MODEL.VIT.DROP=0.1",
    "MODEL.VIT.DROP_PATH=0.3", "DATA.KWARGS.n=24", "RUN.SAVE_STEPS=2", "SEED=3",
)  # fmt: skip


def steps_in_mid_epoch(seed):
    """Sample three steps in the middle of an epoch, after the first checkpoint."""
    inside = [step for step in range(5, END) if step % PER_EPOCH]
    return sorted(random.Random(seed).sample(inside, 3))


def start(folder, *words, code=0, **options):
    """Start or resume a run, until it ends with this code."""
    words = (*LONG, *words, "--resume", "--import", WITNESS)
    finish(folder, *words, code=code, WITNESS=f"{folder}.seen", **options)
    return folder


def broken_thrice(folder, what, code, *words, seed):
    """Break a run of one process at three steps, and restart it after each."""
    for step in steps_in_mid_epoch(seed):
        start(folder, *words, code=code, fault={"what": what, "step": step})
    return start(folder, *words)


def resumptions(folder):
    return (folder / "log.txt").read_text().count("resuming from")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The uninterrupted run of one process."""
    return start(tmp_path_factory.mktemp("one") / "run")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """{strategy: the uninterrupted run of two ranks}."""
    root = tmp_path_factory.mktemp("two")
    settings = STRATEGIES.items()
    torchrun(2, *(["train", *LONG, word, "--output_dir", root / name] for name, word in settings))
    return {name: root / name for name in STRATEGIES}


def test_one_process_stopped_thrice(one, tmp_path):
    folder = broken_thrice(tmp_path / "run", "signal", 75, seed=2)
    assert resumptions(folder) == 3
    assert_same_end(folder, one)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_of_two_ranks_killed_thrice(one, two, strategy, tmp_path):
    """The launcher restarts both ranks. Together they see the samples of a single process."""
    steps = steps_in_mid_epoch(strategy)
    kills = [{"what": "kill", "step": step, "rank": n % 2} for n, step in enumerate(steps)]
    settings = dict(dist=2, launcher=["--max-restarts=3"], fault=kills, **ELASTIC)
    folder = start(tmp_path / "run", STRATEGIES[strategy], **settings)
    assert resumptions(folder) == 3
    assert_same_end(folder, two[strategy])
    assert order(folder) == order(one)


@pytest.mark.parametrize("workers", variants([2, 0], 1))
def test_killed_thrice_in_mid_epoch(one, workers, tmp_path):
    """No sample is seen twice or never in an epoch."""
    words = f"DATALOADER.WORKERS={workers}"
    folder = broken_thrice(tmp_path / "run", "kill", -9, words, seed=4 + workers)
    assert resumptions(folder) == 3
    assert_same_end(folder, one)
    assert order(folder) == order(one)
    assert miscounted(order(folder), PER_EPOCH, IMAGES) == 0


@pytest.mark.parametrize("task", cases(OTHERS))
def test_every_task_killed_and_then_stopped(task, tmp_path):
    """The same for steps, evaluations, and values that a task derives from the training set."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert vil("train", *words_of(task, whole), *DRAWING, "--output_dir", whole).code == 0
    words = (*words_of(task, folder), *DRAWING)
    for what, step, code in (("kill", 4, -9), ("signal", 7, 75)):
        finish(folder, *words, "--resume", code=code, fault={"what": what, "step": step})
    assert vil("train", "--resume", "--output_dir", folder, *words).code == 0
    assert resumptions(folder) == 2
    assert figures(metrics(folder)) == figures(metrics(whole))
    assert_same_end(folder, whole)
