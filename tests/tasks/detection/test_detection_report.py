"""The report of a detector: the numbers of evaluation, curves, confusions and images."""

import json
import re

import numpy as np
import pytest

from tests.common.detection.toy_task import CPU, ToyDetector
from tests.tasks.detection.test_error_analysis import BOX, FAR, squares, thing  # noqa: F401
from vil.data.loader import EvalLoader
from vil.tasks.detection.coco_eval import average_precision, evaluate
from vil.tasks.detection.data.datasets import CocoDataset
from vil.tasks.detection.error_analysis import count_confusions
from vil.tasks.detection.task import DetectionTask


@pytest.mark.parametrize(
    ("objects", "found", "pairs"),
    [
        ([], [], []),
        ([thing(BOX)], [thing(BOX)], ["aa"]),
        ([thing(BOX)], [thing(BOX, 2)], ["ab"]),
        ([thing(BOX)], [], ["a-"]),
        ([], [thing(BOX, 2)], ["-b"]),
        ([thing(BOX), thing(FAR, 2)], [thing(FAR), thing(BOX)], ["aa", "ba"]),
        ([thing(BOX)], [thing(BOX), thing(BOX)], ["aa", "-a"]),
        ([thing([0, 0, 90, 90], crowd=1)], [thing(BOX), thing(FAR, 2)], []),
    ],
)
def test_confusions(objects, found, pairs):
    """Pairs of a true and a detected class, with "-" for background; in two images alike."""
    objects = [{**row, "image_id": image} for image in (1, 2) for row in objects]
    results = [{**row, "image_id": image, "score": 0.9} for image in (1, 2) for row in found]
    for number, row in enumerate(objects, start=1):
        row.update(id=number, area=row["bbox"][2] * row["bbox"][3])
    truth = {"images": [{"id": 1}, {"id": 2}], "annotations": objects}
    truth["categories"] = [{"id": 2, "name": "b"}, {"id": 1, "name": "a"}]
    expected = np.zeros((3, 3), int)
    for true, detected in pairs:
        expected["ab-".index(true), "ab-".index(detected)] += 2
    assert count_confusions(truth, results).tolist() == expected.tolist()


@pytest.fixture
def task(squares):  # noqa: F811
    """Of the squares, whose class is what the toy takes them for; it finds 3 of 6."""
    truth = json.loads(squares.annotations.read_text())
    for row in truth["annotations"]:
        row["category_id"] = 1
    squares.annotations.write_text(json.dumps(truth))
    dataset = CocoDataset(squares.folder, squares.annotations, "val", masks=True)
    loader = EvalLoader(dataset, batch_size=2)
    return DetectionTask(device=CPU, test_sets={"set": loader}, masks=True)


def test_the_page_says_what_evaluation_says(task):
    report = task.report(ToyDetector(), ["1", "2", "3"], "best checkpoint, step 7")
    metrics = task.evaluate(ToyDetector())["set"]
    cards = {title: value for title, value, _ in report.cards}
    assert cards["Box AP, evaluated for this page"] == f"{metrics['box_ap']:.2f}%"
    assert cards["Mask AP50"] == f"{metrics['mask_ap50']:.2f}%"
    (page,) = report.sections
    for name in ("box_ap", "mask_ap"):
        assert f'<td class="number">{metrics["per_class"][name]["1"]:.2f}</td>' in page
    assert len(re.findall("<polyline points=", page)) == 2 * 4  # a curve and its legend
    assert page.count("data:image/jpeg;base64,") == 3
    assert "IoU 0.5 and score 0.5 or more" in page
    *_, matrix = page.partition("Confusion matrix")
    row = re.search(r'<th scope="row" title="1"><bdi>1</bdi></th>.*?</tr>', matrix, re.DOTALL)
    assert re.findall(r">(\d+)</td>", row[0]) == ["3", "0", "0", "3"]  # found, and missed


def test_the_curves_are_those_behind_the_metric(task):
    annotations = task.test_sets["set"].dataset.annotations
    rows = task.collect_results(ToyDetector().eval(), "set", lambda: None)
    found = evaluate(annotations, rows, "bbox")
    assert found.num_objects == [6, 0, 0]
    precision = found.precision[..., 0, 0, -1]
    metrics = average_precision(annotations, rows)
    assert 100 * precision.mean() == pytest.approx(metrics["box_ap"])
    assert 100 * precision[0].mean() == pytest.approx(metrics["box_ap50"])
