"""EVAL.METRIC selects the best checkpoint, and is refused before any work if it cannot."""

import math

import pytest
import torch

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CLASSES, CPU, toy_train
from vil.config import get_config, override
from vil.engine.checkpoint.save_load import resolve_link
from vil.engine.loop import Metric
from vil.tasks import task_for
from vil.utils.errors import ConfigError

pytestmark = pytest.mark.smoke

DIGITS = "digits/vil_nano.yaml"
SCENES = "scenes/retinanet_vil_nano.yaml"


@pytest.mark.parametrize(
    ("file", "words", "metric"),
    [
        (DIGITS, [], Metric("top1", True, "top-1", "%")),
        (DIGITS, ["EVAL.METRIC=macro_f1"], Metric("macro_f1", True, "macro F1", "%")),
        (DIGITS, ["EVAL.METRIC=loss"], Metric("loss", False, "loss", "")),
        pytest.param(
            SCENES, [], Metric("box_ap", True, "box AP", "%"), marks=pytest.mark.detection
        ),
        pytest.param(
            SCENES, ["EVAL.METRIC=box_ap50"], Metric("box_ap50", True, "box AP50", "%"),
            marks=pytest.mark.detection,
        ),
        pytest.param(
            "scenes/mask_rcnn_vil_nano.yaml", [], Metric("mask_ap", True, "mask AP", "%"),
            marks=pytest.mark.detection,
        ),
    ],
)  # fmt: skip
def test_the_config_selects_the_metric(file, words, metric):
    assert task_for(get_config(file, words), CPU).metric == metric


@pytest.mark.parametrize(
    ("file", "words", "reason"),
    [
        (DIGITS, ["EVAL.METRIC=balanced_acuracy"], "did you mean 'balanced_accuracy'"),
        (DIGITS, ["EVAL.METRIC=box_ap"], "unknown metric of TASK classification 'box_ap'"),
        (DIGITS, ["TASK=multilabel", "EVAL.METRIC=mAP"], "did you mean 'map'"),
        (DIGITS, ["TASK=regression", "EVAL.METRIC=mse"], "did you mean 'rmse'"),
        (SCENES, ["EVAL.METRIC=top1"], "unknown metric of TASK detection 'top1'"),
    ],
)
def test_a_metric_that_the_task_lacks_is_refused(file, words, reason):
    with pytest.raises(ConfigError, match=f"command line: EVAL.METRIC: .*{reason}") as caught:
        get_config(file, words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["EVAL.METRIC=top5", "DATA.NUM_CLASSES=5"], "with DATA.NUM_CLASSES 5: .* one of loss"),
        (
            ["EVAL.METRIC=auroc", "DATA.NUM_CLASSES=101"],
            "DATA.NUM_CLASSES 101: set EVAL.METRIC to one of",
        ),
        (["EVAL.METRIC=ece", "DATA.TARGETMAP=map.txt"], "DATA.TARGETMAP: .* one of loss, top1"),
    ],
)
def test_a_metric_that_the_test_sets_lack_is_refused(words, reason):
    with pytest.raises(ConfigError, match=reason):
        task_for(get_config(DIGITS, words), CPU)


@pytest.mark.detection
def test_a_detector_without_masks_has_no_metric_of_masks():
    with pytest.raises(ConfigError, match="retinanet predicts no masks"):
        task_for(get_config(SCENES, ["EVAL.METRIC=mask_ap"]), CPU)


# ---- in the loop


class Scripted(ClassificationTask):
    """A task whose evaluations return known values of the metric ece, None for no value."""

    metric = Metric("ece", higher_is_better=False)

    def __init__(self, values):
        super().__init__(device=CPU, test_sets={}, num_classes=CLASSES)
        self.values = iter(values)

    def evaluate(self, model, between):
        value = next(self.values)
        return {"set": {"top1": 1.0} | ({} if value is None else {"ece": value})}


def test_a_value_that_is_nan_or_missing_is_never_the_best(tmp_path, capsys):
    values = [math.nan, None, 3.0, math.nan, 5.0]
    state = toy_train(tmp_path, task=Scripted(values), epochs=5, dropout=0.0)
    assert (state.best, state.best_step) == (3.0, 15)
    assert resolve_link(tmp_path / "checkpoints", "best").name == "step-00000015"
    said = capsys.readouterr().out
    assert said.count("WARNING ece of set is NaN: this checkpoint cannot be the best") == 1
    assert said.count("WARNING ece of set is not among top1") == 1


def test_a_run_without_any_value_has_no_best_checkpoint(tmp_path):
    state = toy_train(tmp_path, task=Scripted([math.nan] * 2), dropout=0.0, drop_on_plateau=2.0)
    assert (state.best, state.best_step, state.drops) == (None, None, 0)
    assert resolve_link(tmp_path / "checkpoints", "best") is None
    assert resolve_link(tmp_path / "checkpoints", "last").name == "step-00000010"


def test_another_metric_on_resume_begins_a_new_best(tmp_path, capsys):
    class Accurate(Scripted):
        metric = Metric("top1")

    toy_train(tmp_path, task=Accurate([0.1] * 2), epochs=2, dropout=0.0)
    state_file = torch.load(resolve_link(tmp_path / "checkpoints", "last") / "state.pt")
    assert state_file["state"]["metric"] == ""
    state = toy_train(tmp_path, task=Scripted([9.0, 8.0]), epochs=4, dropout=0.0, metric="ece")
    assert (state.best, state.best_step, state.metric) == (8.0, 20, "ece")
    assert "best checkpoint is now selected by ece, previously by the default metric" in (
        capsys.readouterr().out
    )


def test_another_test_set_on_resume_begins_a_new_best(tmp_path, capsys):
    def resume(values, epochs, test_set):
        task, options = Scripted(values), dict(epochs=epochs, dropout=0.0, metric="ece")
        return toy_train(tmp_path, task=task, test_set=test_set, **options)

    assert resume([5.0], 1, "").best == 5.0  # of an older version, without the name
    assert resume([6.0], 2, "easy").best == 5.0
    state = resume([9.0, 8.0], 4, "hard")
    assert (state.best, state.best_step, state.test_set) == (8.0, 20, "hard")
    assert "best checkpoint is now selected on hard, previously on easy" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["vil_nano_96", "vil_tiny_128", "vil_tiny_224"])
def test_recipes_for_photographs_select_by_balanced_accuracy(name):
    assert get_config(f"own/{name}.yaml").EVAL.METRIC == "balanced_accuracy"


@pytest.mark.parametrize(
    ("words", "metric"),
    [
        (["TASK=regression"], "mae"),
        (["TASK=multilabel"], "map"),
        (["TASK=multilabel", "EVAL.METRIC=macro_f1"], "macro_f1"),
        (["DATA.TARGETMAP=map.json"], "top1"),
        (["DATA.TARGETMAP=map.json", "EVAL.METRIC=loss"], "loss"),
        pytest.param(["DETECTION.MODEL=retinanet"], "box_ap", marks=pytest.mark.detection),
    ],
)
def test_the_metric_of_a_recipe_gives_way_to_another_task(words, metric, tmp_path, caplog):
    """Also to other classes of the test set. Either is set on the command line, in Python, or in a
    file whose base is the recipe."""
    file = tmp_path / "mine.yaml"
    lines = "".join(f"{word.replace('=', ': ')}\n" for word in words)
    file.write_text(f"_BASE_: own/vil_nano_96.yaml\n{lines}")
    recipe = "own/vil_nano_96.yaml"
    configs = get_config(recipe, words), get_config(file), override(get_config(recipe), words)
    for cfg in configs:
        cfg = override(cfg, ["DATA.NUM_CLASSES=3"])
        assert task_for(cfg, CPU).metric.name == metric
    assert "is ignored" not in caplog.text  # the user did not set it


def test_a_metric_of_the_user_that_gives_way_to_another_task_is_named(tmp_path, caplog):
    file = tmp_path / "mine.yaml"
    file.write_text("_BASE_: own/vil_nano_96.yaml\nEVAL: {METRIC: top5}\n")
    assert get_config(file, ["TASK=regression"]).EVAL.METRIC == ""
    assert "EVAL.METRIC top5 is not a metric of TASK regression, so it is ignored" in caplog.text


def test_a_recipe_s_metric_with_a_class_map_in_the_same_place_is_refused():
    words = ["EVAL.METRIC=balanced_accuracy", "DATA.TARGETMAP=map.json", "DATA.NUM_CLASSES=3"]
    with pytest.raises(ConfigError, match="is not computed with DATA.TARGETMAP"):
        task_for(get_config("own/vil_nano_96.yaml", words), CPU)


def test_a_metric_that_is_set_with_or_after_the_task_must_be_one_of_it():
    for words in (["TASK=regression", "EVAL.METRIC=top1"], ["EVAL.METRIC=top1", "TASK=regression"]):
        with pytest.raises(ConfigError, match="unknown metric of TASK regression 'top1'"):
            get_config("own/vil_nano_96.yaml", words)
