"""A run ends after some evaluations without an improvement, and resumes to the same end."""

import json

import pytest

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CLASSES, CPU, held_out, launch, metrics, toy_train
from tests.engine.test_loop import assert_same_run
from vil.engine.checkpoint.save_load import TrainState, resolve_link
from vil.engine.loop import Metric

pytestmark = pytest.mark.smoke


def scripted(*values, metric=None):
    """A task whose evaluations, one per epoch of 5 steps, give these values of the metric."""
    remaining = list(values)

    class Scripted(ClassificationTask):
        def evaluate(self, model, between=lambda: None):
            results = super().evaluate(model, between)
            results["odd"][self.metric.name] = remaining.pop(0)
            return results

    task = Scripted(device=CPU, test_sets={"odd": held_out(12)}, num_classes=CLASSES)
    task.metric = metric or task.metric
    return task


def status(folder):
    return json.loads((folder / "status.json").read_text())


def test_a_run_stops_after_evaluations_without_an_improvement(tmp_path, capsys):
    options = dict(epochs=9, patience=2, keep=1)
    state = toy_train(tmp_path, task=scripted(10, 50, 30, 50), **options)
    assert (state.step, state.best, state.best_step, state.stale) == (20, 50, 10, 2)
    reason = "stopped early after step 20: 2 evaluations in a row did not improve the metric"
    assert f"{reason} (RUN.PATIENCE 2), the best is 50 of step 10" in capsys.readouterr().out
    ended = status(tmp_path)
    assert (ended["state"], ended["code"], ended["step"]) == ("finished", 0, 20)
    assert ended["reason"].startswith(reason)
    names = [resolve_link(tmp_path / "checkpoints", link).name for link in ("best", "last")]
    assert names == ["step-00000010", "step-00000020"]

    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert toy_train(tmp_path, task=scripted(), **options) == state
    assert f"nothing to do: {reason}" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert status(tmp_path) == ended
    longer = toy_train(tmp_path, task=scripted(60, 50), epochs=6)
    assert (longer.step, longer.best, longer.stale) == (30, 60, 1)
    assert status(tmp_path)["reason"] == ""


def test_a_metric_that_falls_improves(tmp_path):
    task = scripted(3.0, 2.0, 2.5, 1.0, metric=Metric("error", higher_is_better=False))
    state = toy_train(tmp_path, task=task, epochs=4, patience=2)
    assert (state.step, state.best, state.stale) == (20, 1.0, 0)


def after(*values, **options):
    state = TrainState(0, 1, 1, 1, "sgd")
    for value in values:
        state = state.after_eval(value, **options)
    return state


def test_small_improvements_count_once_they_add_up_to_min_delta():
    state = after(10, 11, 12, 13, 13.5, min_delta=2)
    assert (state.best, state.improved, state.stale) == (13.5, 13, 1)
    state = after(10, 12, min_delta=2)
    assert (state.best, state.improved, state.stale) == (12, 10, 1)
    state = after(3.0, 2.0, 1.9, min_delta=0.5, higher_is_better=False)
    assert (state.best, state.improved, state.stale) == (1.9, 2.0, 1)


def test_a_resumed_run_stops_at_the_same_step_with_the_same_bits(tmp_path):
    values, options = (10, 50, 30, 20, 10), dict(epochs=9, patience=3)
    straight = toy_train(tmp_path / "straight", task=scripted(*values), **options)
    assert (straight.step, straight.stale) == (25, 3)
    toy_train(tmp_path / "halves", task=scripted(*values[:3]), max_steps=15, **options)
    assert toy_train(tmp_path / "halves", task=scripted(*values[3:]), **options) == straight
    assert_same_run(tmp_path / "straight", tmp_path / "halves")


def test_another_metric_on_resume_starts_the_count_again(tmp_path):
    toy_train(tmp_path, task=scripted(50, 40), epochs=2, patience=3)
    task = scripted(3, 4, 2, 1, metric=Metric("precision"))
    state = toy_train(tmp_path, task=task, epochs=9, patience=2, metric="precision")
    assert (state.step, state.best, state.improved, state.stale) == (30, 4, 4, 2)


@pytest.mark.long
def test_all_ranks_stop_together(tmp_path):
    options = dict(epochs=30, patience=1, min_delta=50.0)  # points of top-1
    launch(2, (tmp_path / "two", options))
    assert status(tmp_path / "two")["reason"].startswith("stopped early after step 10: 1 eval")
    toy_train(tmp_path / "one", dropout=0.0, **options)
    ends = [metrics(folder)[-1]["step"] for folder in (tmp_path / "one", tmp_path / "two")]
    assert ends == [10, 10]
