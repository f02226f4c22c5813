"""What every task promises: exact resuming, the same metrics from the command and from Python and
for any number of processes, predictions in every format, a report."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vil as package
from tests.common.marks import cases
from tests.common.small_runs import figures, metrics, succeeds, torchrun, vil
from tests.common.small_tasks import IMAGE_TASKS, SMALL_TASKS
from vil.data.datasets.fake import Fake
from vil.export import load_exported
from vil.pretrained.state_dict_io import read_metadata, read_weights, write_weights
from vil.tasks import TASKS
from vil.utils.json_text import to_json
from vil.workflows.configure import make_config
from vil.workflows.train import train_config

TASK_NAMES = list(SMALL_TASKS)


def train(task, root, folder, *words, **options):
    cfg = make_config(None, [*SMALL_TASKS[task], *words], output_dir=root / folder, data=root)
    return train_config(cfg, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("tasks")


# pytest makes a fixture with parameters again if other tests came between: each in a new folder


@pytest.fixture(scope="module", params=cases(TASK_NAMES, long=TASK_NAMES[1:]))
def trained(request, tmp_path_factory):
    """(task, result of a run)."""
    return request.param, train(request.param, tmp_path_factory.mktemp("whole"), request.param)


def test_every_task_has_a_small_run():
    assert sorted(SMALL_TASKS) == sorted(TASKS)


def test_a_resumed_run_is_bit_identical(trained, tmp_path):
    task, whole = trained
    train(task, tmp_path, task, max_steps=whole.step // 2 + 1)
    resumed = train(task, tmp_path, task, resume=True)
    assert resumed.step == whole.step
    one, other = (load_file(r.last_checkpoint / "model.safetensors") for r in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics(whole.run_dir, "val")[-1]["step"] == whole.step
    last = [figures(metrics(run.run_dir, "val"))[-1] for run in (whole, resumed)]
    assert last[0] == last[1]
    assert " is () from here" not in (resumed.run_dir / "log.txt").read_text()


def test_python_and_the_command_evaluate_alike(trained, root):
    _, run = trained
    found = package.evaluate(run.run_dir, checkpoint="last")
    assert to_json(found) == to_json(run.metrics)
    succeeds("evaluate", "--run", run.run_dir, "--checkpoint", "last")
    (results,) = run.run_dir.glob("eval/**/results.json")
    assert json.loads(results.read_text()) == json.loads(to_json(found))


def test_every_format_has_every_image(trained, root):
    task, run = trained
    pictures = root / "pictures"
    pictures.mkdir(exist_ok=True)
    for number in range(3):
        Fake(None, "val", n=3, size=32).image(number).save(pictures / f"{number}.png")
    (pictures / "3.png").write_text("no image")
    for name in TASKS[task].facts["formats"]:
        ended = vil("predict", "--run", run.run_dir, pictures, "--format", name)
        assert ended.code == 0, ended.err
        shown = 3 if name == "coco" else 4  # COCO's format has no place for unreadable images
        assert all(f"{number}.png" in ended.out for number in range(shown)), ended.out
    predictions = list(package.predict(run.run_dir, pictures))
    assert [bool(p.error) for p in predictions] == [False, False, False, True]


@pytest.fixture(scope="module", params=cases(IMAGE_TASKS))
def image_run(request, tmp_path_factory):
    """(task, folder of a run) of a task with one target per image."""
    words = [*SMALL_TASKS[request.param], "OPTIM.EPOCHS=1", "DATA.KWARGS.n=16"]
    run = package.train(None, words, output_dir=tmp_path_factory.mktemp("image") / request.param)
    return request.param, run.run_dir


def values_of(prediction) -> np.ndarray:
    """All predicted probabilities, in the order of the classes, or numbers."""
    if hasattr(prediction, "classes"):
        return np.array([share for _, share in sorted(prediction.classes)])
    return np.array(getattr(prediction, "probabilities", None) or prediction.numbers)


@pytest.mark.long
@pytest.mark.parametrize("name", ["m.onnx", "m.pt2"])
def test_an_exported_file_gives_the_predicted_values(image_run, root, name):
    """Numbers in their units, and in float64."""
    task, run = image_run
    image = Fake(None, "val", n=1, size=32).image(0)
    model = package.load_for_inference(run)
    expected = values_of(*package.predict(model, image))
    judged = succeeds("export", "--run", run, "--out", root / name, "--dynamic", "batch", "--check")
    file = load_exported(root / name)
    outputs = file(model.transform(image)[None])[0].detach()
    assert outputs.dtype == (torch.float64 if task == "regression" else torch.float32)
    activate = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "none": lambda x: x}
    found = activate[file.metadata["activation"]](outputs)
    assert found.numpy() == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert file.metadata["task"] == task
    model_line, file_line = re.findall(r"fake \S+ +(loss .+)", judged)
    assert model_line == file_line


def test_a_converted_file_predicts_and_evaluates_alike(image_run, root):
    task, run = image_run
    file = root / f"{task}.safetensors"
    succeeds("convert", run, file)
    image = Fake(None, "val", n=1, size=32).image(0)
    ours, theirs = (values_of(*package.predict(source, image)) for source in (run, file))
    assert np.array_equal(ours, theirs)
    words = ["DATA.TEST=[fake]", "DATA.KWARGS={n: 16, size: 32, num_classes: 4}"]
    found = package.evaluate(file, words, output_dir=root / f"{task}-file")
    assert to_json(found) == to_json(package.evaluate(run))


def test_a_card_sets_only_what_its_task_learns(image_run, root):
    task, run = image_run
    succeeds("convert", run, root / "card.safetensors")
    card = read_metadata(root / "card.safetensors")
    card["task"] = {"name": task, "settings": {"SEED": [1]}}
    write_weights(root / "bad.safetensors", read_weights(root / "card.safetensors"), card)
    ended = vil("predict", "MODEL.MODEL_PATH", root / "bad.safetensors", "--sample")
    assert ended.code == 2
    assert f"sets SEED, which TASK {task} does not learn" in ended.err


def test_drawings_and_the_report(trained, root):
    task, run = trained
    Fake(None, "val", n=1, size=32).image(0).save(root / "one.png")
    succeeds("predict", "--run", run.run_dir, root / "one.png", "--output", root / f"{task}-drawn")
    assert (root / f"{task}-drawn/one.png").exists()
    succeeds("report", run.run_dir, "--out", root / f"{task}.html")
    page = (root / f"{task}.html").read_text()
    assert "in training" in page


def test_thresholds_are_stored_and_used(root):
    """For the temperature of classification see tests/workflows/test_calibrate_run.py."""
    run = train("multilabel", root, "calibrated", "OPTIM.EPOCHS=1", "DATA.KWARGS.n=16").run_dir
    said = succeeds("evaluate", "--run", run, "--calibrate")
    stored = json.loads((run / "calibration.json").read_text())
    names = ("fake", "val set fake")
    assert all(name in said for name in names)
    metrics = package.evaluate(run)["fake"]
    assert metrics["loss"] == pytest.approx(stored["after"]["loss"])
    assert set(stored["thresholds"]) == set((run / "classes.txt").read_text().split("\n")[:-1])
    assert stored["after"]["macro_f1"] >= stored["before"]["macro_f1"]
    (prediction,) = package.predict(run, Fake(None, "val", n=1, size=32).image(0))
    chosen = list(stored["thresholds"].values())
    expected = [i for i, p in enumerate(prediction.probabilities) if p >= chosen[i]]
    assert prediction.labels == expected
    stored["thresholds"].popitem()
    (run / "calibration.json").write_text(json.dumps(stored))
    ended = vil("evaluate", "--run", run)
    assert ended.code == 4
    assert "belongs to another model" in ended.err


@pytest.mark.long
def test_any_number_of_processes_evaluates_alike(root):
    """1, 2 and 3 processes: equal to the last digit, classification with a temperature that they
    find."""
    runs = {task: train(task, root, f"{task}-ranks").run_dir for task in TASK_NAMES}
    found = {}
    for world in (1, 2, 3):
        lines = [
            ["evaluate", "--run", run, "--output_dir", f"{run}/{world}"] for run in runs.values()
        ]
        lines[0].append("--calibrate")
        torchrun(world, *lines)
        found[world] = {
            task: json.loads((run / str(world) / "eval/results.json").read_text())
            for task, run in runs.items()
        }
        drawn = list((runs["segmentation"] / str(world)).rglob("*.png"))
        assert len(drawn) == found[world]["segmentation"]["fake_masks"]["count"] == 32
    assert found[1] == found[2] == found[3]
