"""Average precision is what COCO's own code computes, on sets that are meant to be awkward."""

import contextlib
import io
import json
import math

import numpy as np
import pycocotools.mask as masks
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tests.common.detection.masks import paste
from vil.data.rle import compress_runs
from vil.tasks.detection.coco_eval import (
    IOU_TYPES,
    average_precision,
    decode_rle,
    select_results,
    sort_results,
    to_results,
)
from vil.tasks.detection.detections import Mask, from_output

# pycocotools, of itself
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}, {"id": 44, "name": "never seen"}]
FIGURES = ("ap", "ap50", "ap75", "ap_s", "ap_m", "ap_l")
BOTH = ("bbox", "segm")


def rectangle(draw, size):
    """Return a box x y w h in an image of size (H, W): small, medium or large, some at the edge."""
    extent = draw.choice([8, 40, 130]) * draw.uniform(0.6, 1.5, 2)
    corner = draw.uniform(0, 1, 2) * np.maximum(np.array(size[::-1]) - extent, 1)
    return [float(x) for x in (*corner, *np.minimum(extent, np.array(size[::-1]) - corner))]


def polygon(box):
    """A hexagon in the box: a mask that is not its box."""
    x, y, w, h = box
    points = [(0.2, 0), (0.8, 0), (1, 0.5), (0.8, 1), (0.2, 1), (0, 0.5)]
    return [[value for px, py in points for value in (x + px * w, y + py * h)]]


def crowd(box, size):
    """A region of many, as run lengths that are not compressed."""
    pixels = masks.decode(masks.merge(masks.frPyObjects(polygon(box), *size)))
    flat = pixels.flatten(order="F")
    changes = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *changes, flat.size]).tolist()
    return {"size": list(size), "counts": ([0] if flat[0] else []) + counts}


def awkward(seed):
    """Annotations and results: crowds, equal scores, images without objects or detections, near
    misses, more than 100 detections of an image."""
    draw = np.random.default_rng(seed)
    images, truth, results = [], [], []
    for image_id in (7, 2, 30, 11, 12, 40):
        size = (int(draw.integers(150, 260)), int(draw.integers(150, 260)))
        images.append({"id": image_id, "height": size[0], "width": size[1], "file_name": "x.png"})
        boxes = [rectangle(draw, size) for _ in range(0 if image_id == 11 else 7)]
        for number, box in enumerate(boxes):
            many = number == 3
            row = {"id": len(truth) + 1, "image_id": image_id, "iscrowd": int(many), "bbox": box}
            row["category_id"] = int(draw.choice([3, 18]))
            row["segmentation"] = crowd(box, size) if many else polygon(box)
            truth.append({**row, "area": 0.7 * box[2] * box[3]})
        if image_id == 12:
            continue
        strange = [(rectangle(draw, size), 3) for _ in range(110 if image_id == 2 else 4)]
        known = [(row["bbox"], row["category_id"]) for row in truth if row["image_id"] == image_id]
        for near, category in known + known[:3] + strange:
            box = (np.array(near) + draw.normal(0, 1, 4)).clip(0.5)
            box = [float(x) for x in box]
            rle = masks.merge(masks.frPyObjects(polygon(box), *size))
            results.append({
                "image_id": image_id, "category_id": category, "bbox": box,
                "score": float(draw.choice([0.1, 0.5, 0.5, draw.uniform()])),
                "segmentation": {"size": list(size), "counts": rle["counts"].decode()},
            })  # fmt: skip
    return {"images": images, "annotations": truth, "categories": CATEGORIES}, results


def written(truth, folder):
    file = folder / "truth.json"
    file.write_text(json.dumps(truth))
    return file


def by_pycocotools(file, results, kind):
    """Return its 12 metrics, and the AP of each category in the order of ids."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(file))
        evaluation = COCOeval(truth, truth.loadRes(select_results(results, kind)), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    of_classes = np.moveaxis(evaluation.eval["precision"][..., 0, -1], -1, 0)
    per_class = [values[values > -1].mean() if (values > -1).any() else -1 for values in of_classes]
    return evaluation.stats, per_class


def percent(share):
    return 100 * share if share > -1 else math.nan


@pytest.mark.parametrize("seed", range(4))
def test_metrics_equal_those_of_pycocotools(seed, tmp_path, capfd):
    truth, results = awkward(seed)
    file, results = written(truth, tmp_path), sort_results(results)
    figures = average_precision(file, results, BOTH)
    assert capfd.readouterr() == ("", "")
    for kind, first in IOU_TYPES.items():
        stats, per_class = by_pycocotools(file, results, kind)
        assert 5 < percent(stats[0]) < 99
        wanted = {f"{first}_{name}": percent(stats[n]) for n, name in enumerate(FIGURES)}
        wanted[f"{first}_ar100"] = percent(stats[8])
        found = {name: figures[name] for name in wanted}
        assert found == pytest.approx(wanted, abs=1e-6, nan_ok=True)
        names = dict(zip(("car", "dog", "never seen"), map(percent, per_class)))
        of_classes = figures["per_class"][f"{first}_ap"]
        assert of_classes == pytest.approx(names, abs=1e-6, nan_ok=True)
        assert math.isnan(of_classes["never seen"])


def test_the_order_in_which_images_come_changes_nothing(tmp_path):
    """DistInfo hand their images over in an order of their own."""
    truth, results = awkward(5)
    file = written(truth, tmp_path)
    ids = [image["id"] for image in truth["images"]]
    turned = [row for image in reversed(ids) for row in results if row["image_id"] == image]
    assert turned != results
    assert sort_results(turned) == sort_results(results)
    figures = [str(average_precision(file, rows, BOTH)) for rows in (turned, results)]
    assert figures[0] == figures[1]


def test_no_detection_is_zero_and_no_object_is_no_figure(tmp_path):
    truth, results = awkward(1)
    for kinds in (("bbox",), BOTH):
        nothing = average_precision(written(truth, tmp_path), [], kinds)
        assert nothing["box_ap"] == nothing["box_ar100"] == nothing["box_ap_s"] == 0
    empty = average_precision(written({**truth, "annotations": []}, tmp_path), results, BOTH)
    assert all(math.isnan(value) for name, value in empty.items() if name != "per_class")


BOX = [10.0, 10.0, 20.0, 50.0]
IT = [{"id": 1, "name": "it"}]


def one_image(annotations, folder, size=(80, 90), categories=IT):
    """The file of one image, which says that it has this size."""
    image = {"id": 1, "height": size[0], "width": size[1], "file_name": "a.png"}
    rows = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": BOX, **row} for row in annotations]
    return written({"images": [image], "annotations": rows, "categories": categories}, folder)


def rle_of(box, size=(80, 90)):
    rle = masks.merge(masks.frPyObjects(polygon(box), *size))
    return {"size": list(size), "counts": rle["counts"].decode()}


def found_at(box):
    """The result of a detector that finds the object of `one_image`, in 80 x 90 pixels."""
    row = {"image_id": 1, "category_id": 1, "bbox": box, "score": 0.5}
    return [{**row, "segmentation": rle_of(box)}]


def test_annotations_may_lack_what_follows_from_the_box(tmp_path):
    """area, iscrowd; and an id of 0, which COCO's code takes for "not found"."""
    file = one_image([{"id": 0}], tmp_path, categories=[*IT, {"id": 2, "name": "it"}])
    figures = average_precision(file, found_at(BOX))
    assert figures["box_ap"] == figures["box_ap_s"] == pytest.approx(100)
    assert list(figures["per_class"]["box_ap"]) == ["it (1)", "it (2)"]


def test_names_are_those_of_training(tmp_path):
    """Which strips the spaces around and in them."""
    file = one_image([{}], tmp_path, categories=[{"id": 1, "name": " traffic  light "}])
    assert list(average_precision(file, found_at(BOX))["per_class"]["box_ap"]) == ["traffic light"]


@pytest.mark.parametrize("said", [["10", "10", "20", "50"], [[10, 10], [20, 50]]], ids=str)
def test_boxes_that_training_takes_are_evaluated(said, tmp_path):
    file = one_image([{"bbox": said, "area": 10**400}], tmp_path)
    figures = average_precision(file, found_at(BOX))
    assert figures["box_ap"] == figures["box_ap_s"] == pytest.approx(100)


def test_annotations_that_are_none_are_left_out(tmp_path):
    """As they are in training, which warns of them; without a mask a box still counts as a box."""
    good = {"segmentation": polygon(BOX)}
    bad = [{"image_id": 2}, {"category_id": 7}, {"bbox": [1, 2]}, {"bbox": None}, {"image_id": []}]
    rows = [good, *({**good, **fault} for fault in bad)]
    figures = average_precision(one_image(rows, tmp_path), found_at(BOX), BOTH)
    assert figures["box_ap"] == figures["mask_ap"] == pytest.approx(100)
    rows += [{"segmentation": [[1, 2, 3, 4]]}, {"segmentation": []}]
    figures = average_precision(one_image(rows, tmp_path), found_at(BOX), BOTH)
    assert figures["box_ar100"] < 40
    assert figures["mask_ap"] == pytest.approx(100)


@pytest.mark.parametrize("there", [True, False])
def test_an_object_without_a_mask_is_neither_missed_nor_a_false_positive(there, tmp_path):
    """But a detection elsewhere is a false positive; boxes are evaluated all the same."""
    place = [50.0, 10.0, 20.0, 50.0]
    other = {"bbox": place, "segmentation": [], "area": 1000}
    rows = [{"segmentation": polygon(BOX)}, *([other] if there else [])]
    file = one_image(rows, tmp_path)
    figures = average_precision(file, [*found_at(place), *found_at(BOX)], BOTH)
    assert figures["mask_ap"] == pytest.approx(100 if there else 50)
    assert figures["box_ap"] == pytest.approx(100 if there else 50)
    assert average_precision(file, found_at(BOX), BOTH)["mask_ap"] == pytest.approx(100)


@pytest.mark.parametrize("said", [(80, 90), (160, 180), (45, 51)], ids=str)
def test_masks_are_evaluated_at_the_size_of_the_image(said, tmp_path):
    """Whatever size the file gives for it, and its run lengths have: as in training."""
    box = [10.0, 10.0, 20.0, 30.0]
    for shape in (polygon(box), rle_of(box, said)):
        file = one_image([{"bbox": box, "segmentation": shape}], tmp_path, said)
        figures = average_precision(file, found_at(box), BOTH)
        assert figures["box_ap"] == figures["mask_ap"] == pytest.approx(100)


def test_rows_of_an_image():
    """Of an output as torchvision gives it: masks come back pixel by pixel."""
    soft = torch.zeros(2, 1, 40, 31)
    soft[0, 0, 3:9, 2:5], soft[1, 0, 30:40, 20:31], soft[1, 0, 0, 0] = 0.9, 0.51, 0.49
    output = {
        "boxes": torch.tensor([[2.0, 3.0, 5.0, 9.0], [20.5, 30.0, 31.0, 40.0]]),
        "labels": torch.tensor([2, 1]), "scores": torch.tensor([0.75, 0.5]), "masks": soft,
    }  # fmt: skip
    found = from_output(output)
    rows = to_results(found, image_id=9, size=(40, 31), category_ids=[3, 18])
    assert [row["category_id"] for row in rows] == [18, 3]
    assert [row["bbox"] for row in rows] == [[2, 3, 3, 6], [20.5, 30, 10.5, 10]]
    assert [row["score"] for row in rows] == [0.75, 0.5]
    for row, mask in zip(json.loads(json.dumps(rows)), soft[:, 0]):
        assert row["image_id"] == 9
        assert np.array_equal(masks.decode(row["segmentation"]), (mask > 0.5).numpy())
    assert sum(mask.pixels.size for mask in found.masks) < 40 * 31 / 2
    assert all(mask.pixels.base is None for mask in found.masks)  # the whole ones are let go


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ((0, 0), (1, 1)), ((0, 0), (40, 31)), ((10, 0), (40, 5)), ((0, 9), (7, 8)),
        ((5, 5), (0, 3)), ((29, 38), (1, 2)), ((3, 0), (40, 28)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_run_lengths_are_those_of_coco(place, part, share):
    """Of a part (h, w) at (left, top) of 40 x 31 pixels: at borders, as high as all, empty."""
    pixels = np.random.default_rng(0).random(part) < share
    mask = Mask(*place, pixels)
    rle = {"size": [40, 31], "counts": compress_runs(mask.runs((40, 31)))}
    assert (
        rle["counts"] == masks.encode(np.asfortranarray(paste(mask, (40, 31))))["counts"].decode()
    )
    assert np.array_equal(decode_rle(rle), paste(mask, (40, 31)))
