"""Several processes started by torchrun compute what one process computes, and need no more."""

import subprocess

import pytest
import torch
from safetensors.torch import load_file

from tests.common.marks import cases
from tests.common.small_runs import (
    TINY,
    checkpoint,
    command,
    environment,
    free_port,
    metrics,
    results,
    torchrun,
    vil,
)
from tests.common.small_tasks import OTHERS, words_of
from vil.ops.native import library

pytestmark = pytest.mark.long

TEN_STEPS = (*TINY, "DATA.KWARGS.n=361", "DATALOADER.BSZ=36", "OPTIM.EPOCHS=1", "OPTIM.LR=0.05")
# Both draw: augmentation by position, random shift by step. Dropout and mixup draw per rank.
EQUAL = ("MODEL.VIT.DROP_PATH=0", "AMP.TF32=False")
MODES = ("0", "1")
NATIVE = "auto" if library.obstacle() else "native"  # which each process loads


def training(folder, mode):
    backend = {"0": "auto", "1": NATIVE}[mode]
    model = (f"MODEL.VIT.MSVIT.MODE={mode}", f"MODEL.VIT.MSVIT.BACKEND={backend}")
    return ["train", *TEN_STEPS, *EQUAL, *model, "--output_dir", folder]


def training_of(task, folder):
    words = ["OPTIM.OPT=sgd", "OPTIM.LR=0.01", "DATALOADER.BSZ=4", "DATA.KWARGS.n=18"]
    if task == "detection":  # all anchors and proposals: samples are drawn per rank
        words += ["DETECTION.RPN.SAMPLES=100000", "DETECTION.BOX.SAMPLES=100000"]
    return ["train", *words_of(task, folder), *words, *EQUAL, "--output_dir", folder]


def with_batch_norm(folder):
    words = ["MODEL.ARCH=timm/test_resnet", "DATALOADER.BSZ=16", "OPTIM.EPOCHS=1", "OPTIM.EMA=0.5"]
    return ["train", *TINY, *words, "--output_dir", folder]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """<world>-<mode>: runs."""
    root = tmp_path_factory.mktemp("ranks")
    for mode in MODES:
        ended = vil(*training(root / f"1-{mode}", mode))
        assert ended.code == 0, ended.err
    for task in OTHERS:
        assert vil(*training_of(task, root / f"1-{task}")).code == 0
    of_two = [training(root / f"2-{mode}", mode) for mode in MODES]
    of_two += [training_of(task, root / f"2-{task}") for task in OTHERS]
    torchrun(2, *of_two, with_batch_norm(root / "norm"))
    return root


def weights(folder):
    """All weights in one vector."""
    file = checkpoint(folder) / "model.safetensors"
    return torch.cat([tensor.double().flatten() for tensor in load_file(file).values()])


@pytest.mark.defect("B23")
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_train_as_one(root, mode):
    """10 steps of SGD in float32, half the batch each: the same weights but for rounding."""
    alone, together = weights(root / f"1-{mode}"), weights(root / f"2-{mode}")
    fresh = weights_before_training(root / f"1-{mode}")
    assert (alone - fresh).norm() > 1e-2 * fresh.norm()
    assert (together - alone).norm() < 1e-6 * alone.norm()
    ours, theirs = metrics(root / f"2-{mode}", "train"), metrics(root / f"1-{mode}", "train")
    assert [line["step"] for line in ours] == list(range(1, 11))
    for name in ("loss", "top1", "lr"):
        assert [a[name] for a in ours] == pytest.approx([b[name] for b in theirs], rel=1e-5)


@pytest.mark.parametrize("task", cases(OTHERS))
def test_two_processes_train_every_task_as_one(root, task):
    """A detector nearly: each rank averages over its own proposals."""
    rel = 1e-2 if task == "detection" else 1e-5
    alone, together = weights(root / f"1-{task}"), weights(root / f"2-{task}")
    assert (together - alone).norm() < rel * alone.norm()
    ours, theirs = (metrics(root / f"{n}-{task}", "train") for n in (2, 1))
    assert [line["loss"] for line in ours] == pytest.approx([a["loss"] for a in theirs], rel=rel)
    ours, theirs = (metrics(root / f"{n}-{task}", "val")[-1] for n in (2, 1))
    assert ours["count"] == theirs["count"]


def weights_before_training(folder):
    import vil as package
    from vil.config import get_config

    state = package.build_model(get_config(folder / "config.yaml")).state_dict()
    names = load_file(checkpoint(folder) / "model.safetensors")
    return torch.cat([state[name].double().flatten() for name in names])


def test_batch_norms_evaluate_as_they_are_saved(root):
    """Each process has statistics of its own; those of the first are everybody's."""
    logged = metrics(root / "norm", "val")[-1]["loss"]
    assert vil("evaluate", "--run", root / "norm", "--checkpoint", "last").code == 0
    assert results(root / "norm")["fake"]["loss"] == pytest.approx(logged, rel=1e-6)


def test_one_process_needs_no_environment(tmp_path):
    """Not even a HOME or a PATH."""
    ended = subprocess.run(
        command("train", *TINY, "DATA.KWARGS.n=32", "--output_dir", tmp_path / "run"), env={},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert checkpoint(tmp_path / "run").name == "step-00000004"


def test_no_process_waits_for_a_folder_that_cannot_be_created(root, tmp_path):
    """Started without torchrun, which would end the other process."""
    (tmp_path / "eval").write_text("a file where the folder should be")
    line = command("evaluate", "--run", root / "1-0", "--output_dir", tmp_path)
    world = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [
        subprocess.Popen(line, env=environment(**world, RANK=rank, LOCAL_RANK=rank), **pipes)
        for rank in ("0", "1")
    ]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 1]
    assert "vil evaluate (rank 0): OUTPUT_DIR" in errors[0]
    assert "rank 0 failed" in errors[1]
