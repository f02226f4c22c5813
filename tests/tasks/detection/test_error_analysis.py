"""The worst images: missed objects and false positives, compared with hand-made counts."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.common.detection.toy_task import CPU, ToyDetector
from vil.data.loader import EvalLoader
from vil.tasks.detection.data.datasets import CocoDataset
from vil.tasks.detection.error_analysis import count_errors, draw_worst
from vil.tasks.detection.task import DetectionTask

BOX, FAR = [10, 10, 20, 20], [60, 60, 20, 20]  # x y w h


def thing(box, category=1, crowd=0):
    return {"bbox": box, "category_id": category, "iscrowd": crowd}


@pytest.mark.parametrize(
    ("objects", "found", "count"),
    [
        ([], [], 0),
        ([thing(BOX)], [], 1),
        ([], [thing(BOX)], 1),
        ([thing(BOX)], [thing(BOX)], 0),
        ([thing(BOX)], [thing([12, 12, 20, 20])], 0),  # IoU 0.68
        ([thing(BOX)], [thing([20, 10, 20, 20])], 2),  # IoU 0.33: missed, and wrong
        ([thing(BOX)], [thing(BOX, 2)], 2),
        ([thing(BOX)], [thing(BOX), thing(BOX)], 1),  # found twice
        ([thing(BOX), thing(FAR)], [thing(FAR), thing(BOX)], 0),
        ([thing(BOX, crowd=1)], [], 0),
        ([thing([0, 0, 90, 90], crowd=1)], [thing(BOX), thing(FAR)], 0),
        ([thing([0, 0, 90, 90], crowd=1)], [thing(BOX, 2)], 1),
    ],
)
def test_errors(objects, found, count):
    """Counted among the errors of other images."""
    objects = [{**row, "image_id": image} for image in (1, 2) for row in objects]
    results = [{**row, "image_id": image, "score": 0.9} for image in (1, 2) for row in found]
    for number, row in enumerate(objects, start=1):
        row.update(id=number, area=row["bbox"][2] * row["bbox"][3])
    truth = {"images": [{"id": 1}, {"id": 2}], "annotations": objects}
    truth["categories"] = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    errors = count_errors(truth, results)
    assert (errors[1], errors[2], errors[3]) == (count, count, 0)


@pytest.fixture
def squares(tmp_path):
    """Three images with a bright square; the annotations of the last two have one more object."""
    images, annotations = [], []
    for number in range(3):
        pixels = np.zeros((60, 90, 3), np.uint8)
        pixels[10:30, 10:30] = 102
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        images.append({"id": 9 - number, "file_name": f"{number}.png", "width": 90, "height": 60})
        for x in (10, 40, 65)[: number + 1]:
            box = [x, 10, 20, 20]
            corners = [[x, 10, x + 20, 10, x + 20, 30, x, 30]]
            row = {"image_id": 9 - number, "category_id": 2, "bbox": box, "segmentation": corners}
            annotations.append({**row, "id": len(annotations) + 1})
    categories = [{"id": number, "name": str(number)} for number in (1, 2, 3)]
    truth = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    return CocoDataset(tmp_path, tmp_path / "truth.json", "val", masks=True)


def results_of(squares, folder):
    """What the toy finds in them, as an evaluation writes it."""
    loader = EvalLoader(squares, batch_size=2)
    task = DetectionTask(device=CPU, test_sets={"set": loader}, masks=True)
    task.results_folder = folder
    assert task.evaluate(ToyDetector())["set"]["count"] == 3
    rows, masks = (
        json.loads((folder / f"set_{kind}.json").read_text()) for kind in ("bbox", "segm")
    )
    return [{**row, **mask} for row, mask in zip(rows, masks)]


def test_the_worst_come_first_and_old_ones_go(squares, tmp_path):
    results = results_of(squares, tmp_path)
    (tmp_path / "drawn").mkdir()
    for old in ("set-7-x.png", "other-1-x.png"):
        (tmp_path / "drawn" / old).touch()
    written = draw_worst(squares, results, 2, tmp_path / "drawn", "set")
    assert [path.name for path in written] == ["set-1-2.png", "set-2-1.png"]
    left = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert left == ["other-1-x.png", "set-1-2.png", "set-2-1.png"]
    assert len(draw_worst(squares, results, 9, tmp_path / "drawn", "set")) == 3


def test_an_unreadable_image_is_left_out(squares, tmp_path):
    results = results_of(squares, tmp_path)
    (tmp_path / "2.png").write_bytes(b"")
    written = draw_worst(squares, results, 2, tmp_path / "drawn", "set")
    assert [path.name for path in written] == ["set-2-1.png"]
