"""Killed twice in the middle of an epoch and resumed twice, a run ends as if nothing had happened.

With everything on that draws random numbers: random shift, dropout, drop path, mixup, cutmix,
RandAugment, random erasing, crops and flips.
"""

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.common.small_runs import TINY, checkpoint, command, environment, figures, metrics, vil

pytestmark = pytest.mark.long

STEPS_PER_EPOCH, EPOCHS = 20, 4
KILLS = (23, 63)  # in epoch 2, and in epoch 4, whose attention is no longer random shift's
EVERYTHING = (
    *TINY, "DATA.KWARGS.n=160", "DATALOADER.BSZ=8", f"OPTIM.EPOCHS={EPOCHS}", "OPTIM.OPT=adamw",
    "OPTIM.LR=1e-3", "SOLVER.LR_POLICY=cosine", "SOLVER.WARMUP_EPOCHS=1", "SEED=3",
    "MODEL.VIT.MSVIT.MODE=1", "MODEL.VIT.MSVIT.VIL_MODE_SWITCH=0.75", "MODEL.VIT.DROP=0.1",
    "MODEL.VIT.DROP_PATH=0.3", "AUG.MIXUP_PROB=0.8", "AUG.MIXUP=0.8", "AUG.MIXCUT=1.0",
    "AUG.TIMM_AUG.USE_TRANSFORM=True", "AUG.TIMM_AUG.RE_PROB=0.5", "LOSS.LABEL_SMOOTHING=0.1",
    "AUG.TIMM_AUG.AUTO_AUGMENT=rand-m9-mstd0.5-inc1",
)  # fmt: skip


def launch(folder, *words):
    return subprocess.Popen(
        command("train", *EVERYTHING, "--output_dir", folder, *words), env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process):
    errors = process.communicate(timeout=100)[1]
    assert process.returncode == 0, errors


def kill_after(process, folder, step):
    """SIGKILL as soon as the log shows `step`; returns the last step it shows."""
    deadline = time.monotonic() + 100
    while last_step(folder) < step:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate()
    return last_step(folder)


def last_step(folder):
    """Return the step of the last complete line of metrics.jsonl."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def unbroken(folder):
    finish(launch(folder))


def broken(folder, workers):
    """Returns the steps at which the kills struck."""
    settings = [f"DATALOADER.WORKERS={workers}"]
    struck = []
    for step in KILLS:
        struck.append(kill_after(launch(folder, *settings), folder, step))
        settings = [f"DATALOADER.WORKERS={workers}", "--resume"]
    finish(launch(folder, *settings))
    return struck


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder}, and {name: steps at which it was killed}."""
    root = tmp_path_factory.mktemp("runs")
    names = {"unbroken": None, "0 workers": 0, "2 workers": 2}
    with ThreadPoolExecutor() as at_once:
        whole = at_once.submit(unbroken, root / "unbroken")
        struck = {
            name: at_once.submit(broken, root / name, workers)
            for name, workers in names.items()
            if workers is not None
        }
        whole.result()
        return {name: root / name for name in names}, {k: v.result() for k, v in struck.items()}


BROKEN = pytest.mark.parametrize("name", ["0 workers", "2 workers"])


@BROKEN
def test_the_kills_struck_in_the_middle_of_an_epoch(folders, name):
    """Otherwise nothing below was tested: the checkpoints are of the ends of epochs."""
    for step, wanted in zip(folders[1][name], KILLS):
        assert step >= wanted
        assert step // STEPS_PER_EPOCH == wanted // STEPS_PER_EPOCH
        assert step % STEPS_PER_EPOCH


@pytest.mark.defect("B24")
@BROKEN
def test_the_weights_are_the_same_bits(folders, name):
    for pointer in ("last", "best"):
        ours, theirs = (checkpoint(folders[0][run], pointer) for run in (name, "unbroken"))
        assert ours.name == theirs.name
        weights = "model.safetensors"
        assert (ours / weights).read_bytes() == (theirs / weights).read_bytes()


@BROKEN
def test_the_optimizer_and_the_best_figure_are_the_same(folders, name):
    ours, theirs = (
        torch.load(checkpoint(folders[0][run]) / "state.pt", weights_only=True)
        for run in (name, "unbroken")
    )
    assert ours["state"] == theirs["state"]
    assert ours["state"]["best"] is not None
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    for parameter, state in theirs["optimizer"].items():
        for slot, value in state.items():
            assert torch.equal(ours["optimizer"][parameter][slot], value)


@BROKEN
def test_every_logged_figure_is_the_same_and_there_once(folders, name):
    ours, theirs = metrics(folders[0][name]), metrics(folders[0]["unbroken"])
    assert figures(ours) == figures(theirs)
    steps = [line["step"] for line in ours if line["split"] == "train"]
    assert steps == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert len([line for line in ours if line["split"] == "val/fake"]) == EPOCHS


@BROKEN
def test_the_folder_tells_the_story(folders, name):
    status = json.loads((folders[0][name] / "status.json").read_text())
    assert (status["state"], status["code"], status["step"]) == ("finished", 0, 80)
    assert (folders[0][name] / "command.txt").read_text().count("train") == 3
    log = (folders[0][name] / "log.txt").read_text()
    assert log.count("resuming from") == 2
    assert "step-00000020" in log
    assert "step-00000060" in log


OTHER_ARCH = "MODEL.VIT.MSVIT.ARCH=l1,h1,d16,n2,s1,g1,p4,f3,a0"


def words(folders, *more):
    return ["train", *EVERYTHING, "--output_dir", folders[0]["unbroken"], *more]


def snapshot(folders):
    root = folders[0]["unbroken"]
    files = ("config.yaml", "metrics.jsonl", "status.json", "command.txt", "env.txt")
    kept = [*(root / name for name in files), *root.glob("checkpoints/**/*")]
    return {file: file.read_bytes() for file in kept if file.is_file()}


def test_a_finished_run_has_nothing_to_do(folders):
    before = snapshot(folders)
    ended = vil(*words(folders, "--resume"))
    assert ended.code == 0
    assert "nothing to do: 80 of 80 steps are done" in ended.out
    assert snapshot(folders) == before


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ([], 2, "already holds a run: add --resume"),
        (["--resume", "DATALOADER.BSZ=16"], 4, "was started with DATALOADER.BSZ 8 (now 16)"),
        (["--resume", "DATA.KWARGS.n=168"], 4, "steps_per_epoch 20, this run has 21"),
        (["--resume", "OPTIM.OPT=sgd"], 4, "was started with OPTIM.OPT 'adamw' (now 'sgd')"),
        (["--resume", OTHER_ARCH], 4, "was started with MODEL.VIT.MSVIT.ARCH"),
        (["--resume", OTHER_ARCH, "RUN.ALLOW_CHANGES=True"], 4, "another model"),
    ],
)
def test_a_refused_resume_leaves_the_run_unchanged(folders, more, code, message):
    before = snapshot(folders)
    ended = vil(*words(folders, *more))
    assert (ended.code, ended.out.count("train epoch")) == (code, 0)
    assert message in ended.err
    assert snapshot(folders) == before


def test_a_change_is_allowed_for_one_start_only(tmp_path):
    """Also where the next start reads the config that the run keeps."""
    line = ("train", *TINY, "DATA.KWARGS.n=16", "--output_dir", tmp_path / "run")
    exact = "MODEL.VIT.MSVIT.SW_EXACT=1"
    assert vil(*line).code == 0
    ended = vil(*line, "--resume", "OPTIM.EPOCHS=3", exact, "RUN.ALLOW_CHANGES=True")
    assert ended.code == 0, ended.err
    assert "SW_EXACT is 1 from here, was 0" in ended.out
    ended = vil("train", "--output_dir", tmp_path / "run", "--resume", "DATALOADER.BSZ=8")
    assert ended.code == 4
    assert "DATALOADER.BSZ 16 (now 8)" in ended.err


def test_a_run_can_be_made_longer(folders):
    """More epochs from the current weights; the log continues where it ended."""
    folder = folders[0]["0 workers"]
    ended = vil("train", *EVERYTHING, "--output_dir", folder, "--resume", "OPTIM.EPOCHS=5")
    assert ended.code == 0, ended.err
    assert last_step(folder) == 100
    steps = [line["step"] for line in metrics(folder, "train")]
    assert steps == list(range(1, 101))
