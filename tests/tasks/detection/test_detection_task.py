"""The detection task: losses, evaluation, and the same metrics with any number of ranks."""

import json
import math

import pytest
import torch

from tests.common.detection.toy_task import (
    CPU,
    ToyDetector,
    ToySet,
    launch,
    small_mask_rcnn,
    toy_task,
)
from tests.common.detection.toy_task import main as alone_in_this_process
from tests.common.one_rank import broadcasts
from vil.engine.loop import backward
from vil.tasks.detection.coco_eval import average_precision, to_results
from vil.tasks.detection.data.batch import collate
from vil.tasks.detection.data.datasets import build_detection_set
from vil.tasks.detection.detections import from_target
from vil.utils.errors import SaveError


@pytest.fixture
def toy(tmp_path):
    return ToySet(tmp_path).write()


def batch(toy, count=4):
    return collate([(*toy[index], index) for index in range(count)], ())


def no_scaling():
    return torch.amp.GradScaler("cpu", enabled=False)


def test_evaluation_uses_the_tiles_of_inference(toy, tmp_path):
    task, model, sizes = toy_task(tmp_path, tile=64, overlap=40), ToyDetector(), set()
    model.register_forward_pre_hook(lambda _, args: sizes.update(x.shape[1:] for x in args[0]))
    figures = task.evaluate(model)["toy"]
    assert sizes == {(64, 64)}
    assert figures["box_ap"] == figures["mask_ap"] == pytest.approx(100)
    rows = task.collect_results(model.eval(), "toy", lambda: None)
    found = task.run(model, [toy[index][0] for index in range(len(toy))])
    assert [row["score"] for row in rows] == torch.cat([each.scores for each in found]).tolist()


def test_an_error_of_rank_0_reaches_the_other_ranks(toy, tmp_path, monkeypatch):
    task = toy_task(tmp_path, results_folder=tmp_path / "missing")
    with broadcasts(monkeypatch) as sent, pytest.raises(SaveError):
        task.evaluate(ToyDetector())
    assert "SaveError: " in sent[0][1]


def test_the_truth_of_a_set_scores_a_hundred(tmp_path):
    """Boxes and masks of scenes, as they are trained on, are those that are evaluated with."""
    scenes = build_detection_set("scenes", tmp_path, "val", masks=True, train=2, val=6)
    rows = []
    for image, target in (scenes[index] for index in range(6)):
        size, ids = tuple(image.shape[-2:]), scenes.category_ids
        truth = from_target(target)
        rows += to_results(truth, image_id=target["image_id"], size=size, category_ids=ids)
    figures = average_precision(scenes.annotations, rows, ("bbox", "segm"))
    assert figures["box_ap"] == figures["mask_ap"] == pytest.approx(100)


def test_an_unreadable_image_has_no_detections(toy, tmp_path):
    found = toy_task(tmp_path, broken=(3, 6)).evaluate(ToyDetector())["toy"]
    objects = [len(toy[index][1]["labels"]) for index in range(7)]
    assert found["count"] == 7
    assert sum(objects) > objects[3] + objects[6] > 0
    assert found["box_ar100"] < 100 - 1e-6


@pytest.mark.long
def test_ranks_together_are_one_process(toy, tmp_path):
    """With 1 and 2 processes, on 7 images with one broken and many equal scores: the same metrics
    on every rank to the last digit, and the same files."""
    alone_in_this_process(tmp_path)
    launch(2, tmp_path)
    alone, together = tmp_path / "world-1", tmp_path / "world-2"
    figures = json.loads((alone / "figures-0.json").read_text())
    assert 0 < figures["toy"]["box_ap"] < 99
    for rank in range(2):
        assert json.loads((together / f"figures-{rank}.json").read_text()) == figures
    for file in ("toy_bbox.json", "toy_segm.json"):
        text = (alone / file).read_text()
        assert (together / file).read_text() == text
        assert "50" in text
    assert sorted(path.name for path in together.iterdir()) == [
        "figures-0.json", "figures-1.json", "toy_bbox.json", "toy_segm.json",
    ]  # fmt: skip


def test_parts_add_up_to_the_whole(toy, tmp_path):
    """The losses of a batch are means over its images, so those of equal parts average."""
    task = toy_task(tmp_path)
    found = []
    for parts in (1, 2, 4):
        model = ToyDetector(0.5)
        figures = backward(task, model, task.prepare(batch(toy)), no_scaling(), parts, CPU)
        found.append([model.off.grad.item(), *(float(value) for value in figures.values())])
    assert found[1:] == [pytest.approx(found[0], rel=1e-5)] * 2
    assert list(figures) == ["loss", "loss_box", "loss_mask"]
    with pytest.raises(AssertionError, match="4 images do not divide into 3 equal parts"):
        task.split(batch(toy), 3)


def test_losses_and_answers_of_torchvision(toy, tmp_path):
    """Mask R-CNN with random weights trains and is evaluated as it is."""
    task, model = toy_task(tmp_path), small_mask_rcnn()
    figures = backward(task, model, task.prepare(batch(toy)), no_scaling(), 2, CPU)
    losses = {name: value for name, value in figures.items() if name != "loss"}
    assert len(losses) == 5
    assert float(figures["loss"]) == pytest.approx(float(sum(losses.values())), rel=1e-5)
    assert all(
        value.dtype == torch.float32 and not value.requires_grad for value in losses.values()
    )
    assert model.backbone.body[0].weight.grad.abs().sum() > 0
    results = task.evaluate(model)["toy"]
    assert 0 <= results["mask_ap"] < 50
    assert not math.isnan(results["box_ap"])
