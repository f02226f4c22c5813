"""The loop: resumed runs are the runs they would have been, and nothing is saved that diverged."""

import shutil

import pytest
import torch

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CPU, ToyLoader, metrics, saved_state, toy_train, weights
from vil.engine import loop
from vil.engine.checkpoint.save_load import resolve_link
from vil.engine.loop import seed_step
from vil.utils.train_step import TrainStep

pytestmark = pytest.mark.smoke


def logged(folder, names=("step", "split", "loss", "top1", "lr")):
    """The lines of metrics.jsonl, without times."""
    return [tuple(line.get(name) for name in names) for line in metrics(folder)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 10 steps that was never stopped."""
    folder = tmp_path_factory.mktemp("straight")
    toy_train(folder)
    return folder


def assert_same_run(folder, other):
    ours, theirs = weights(folder), weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = saved_state(folder)["optimizer"], saved_state(other)["optimizer"]
    assert all(torch.equal(ours[n][k], theirs[n][k]) for n in theirs for k in theirs[n])


def test_a_run_stopped_twice_in_the_middle_of_an_epoch_is_the_same_run(straight, tmp_path):
    for stop in (3, 7, None):
        state = toy_train(tmp_path, max_steps=stop)
        assert state.step == (stop or 10)
    assert_same_run(tmp_path, straight)


@pytest.mark.defect("B30")
def test_every_seed_step_and_rank_has_its_own_draw_and_repeats_it():
    def draw(*key):
        seed_step(*key)
        return torch.rand(4).tolist()

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 11, 1), (0, 1, 11), (-1, 0, 0)]
    draws = [draw(*key) for key in keys]
    assert draws == [draw(*key) for key in keys]
    assert len({tuple(numbers) for numbers in draws}) == len(keys)


def test_dropout_is_drawn_from_the_runs_seed(straight, tmp_path):
    toy_train(tmp_path, dropout=0.0)
    toy_train(tmp_path / "other seed", seed=1)
    with_dropout = weights(straight)["1.weight"]
    for folder in (tmp_path, tmp_path / "other seed"):
        assert not torch.equal(weights(folder)["1.weight"], with_dropout)


def test_after_a_crash_no_step_is_logged_twice(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    last = resolve_link(folder / "checkpoints", "last")
    (last / "state.pt").write_bytes(b"cut short")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "spl')
    state = toy_train(folder)
    assert state.step == 10
    assert logged(folder) == logged(straight)
    assert_same_run(folder, straight)
    assert f"checkpoint {last} skipped: state.pt" in (folder / "log.txt").read_text()


def test_the_best_checkpoint_is_that_of_the_first_test_sets_best_top1(straight):
    scores = {m["step"]: m["top1"] for m in metrics(straight) if m["split"] == "val/odd"}
    best = max(scores, key=lambda step: (scores[step], -step))  # strictly greater: the earlier wins
    assert resolve_link(straight / "checkpoints", "best").name == f"step-{best:08d}"
    assert saved_state(straight)["state"]["best"] == scores[best]


def test_evaluation_and_saving_have_their_own_schedules(tmp_path, monkeypatch):
    drawn = []
    toy_train(tmp_path / "often", epochs=5, eval_every=2, draw=drawn.append)
    assert drawn == [tmp_path / "often"]  # at the end
    monkeypatch.setattr(loop, "DRAW_SECONDS", 0)
    drawn.clear()
    toy_train(tmp_path, epochs=5, eval_every=2, save_every=3, keep=9, draw=drawn.append)
    evaluated = [m["step"] for m in metrics(tmp_path) if m["split"] == "val/odd"]
    assert evaluated == [10, 20, 25]
    assert drawn == [tmp_path] * 3
    saved = {int(folder.name[5:]) for folder in (tmp_path / "checkpoints").glob("step-*")}
    assert {15, 25} <= saved <= {10, 15, 20, 25}  # 10 and 20 only if they were the best so far


def test_every_step_passes_its_number_to_the_model(tmp_path):
    steps = []
    toy_train(tmp_path, max_steps=7, set_progress=lambda model, progress: steps.append(progress))
    assert steps == [
        TrainStep(seed=0, step=step, epoch=step // 5, epochs=2, steps_per_epoch=5)
        for step in range(7)
    ]


@pytest.mark.defect("B24")
def test_float16_scales_the_loss_and_saves_the_scale(tmp_path):
    test_sets = {"train": list(ToyLoader().batches(0, 2))}
    task = ClassificationTask(
        device=CPU, num_classes=7, test_sets=test_sets, amp_dtype=torch.float16
    )
    toy_train(tmp_path, task=task, max_steps=4)
    assert saved_state(tmp_path)["scaler"]["scale"] > 1
    assert toy_train(tmp_path, task=task).step == 10
