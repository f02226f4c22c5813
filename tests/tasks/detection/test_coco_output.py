"""`vil predict --format coco`: pycocotools takes it against the user's own file, and finds the AP
that `vil evaluate` finds."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.common.small_runs import results, succeeds, vil
from tests.common.small_tasks import DETECTOR
from vil.tasks.detection.detections import Detections
from vil.tasks.detection.output_formats import Listing, Prediction, as_coco

coco = pytest.importorskip("pycocotools.coco")
cocoeval = pytest.importorskip("pycocotools.cocoeval")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CATEGORIES = [{"id": 17, "name": "cat"}, {"id": 4, "name": "dog"}, {"id": 90, "name": "owl"}]
IDS = {"train": [1, 2, 3, 4], "val": [800, 7, 123456]}  # not contiguous, not in order
OWN = (
    *DETECTOR[:-1], "DATA.TRAIN=[coco]", "DATA.TEST=[coco]", "DETECTION.TEST.SCORE=0",
    "DATA.KWARGS={images: '{split}', annotations: '{split}.json'}", "OPTIM.EPOCHS=4",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_split(root, split):
    """Images of bright squares, two objects in each, in folders of their own."""
    images, annotations = [], []
    for number, image_id in enumerate(IDS[split]):
        pixels = np.zeros((64, 80, 3), np.uint8)
        name = f"part {number % 2}/{number}.png"
        images.append({"id": image_id, "file_name": name, "width": 80, "height": 64})
        for x, category in ((4, 17), (44, 4)):
            x, y = x + number, 20 - 3 * number
            pixels[y : y + 24, x : x + 26, x % 3] = 255
            corners = [[x, y, x + 26, y, x + 26, y + 24, x, y + 24]]
            annotations.append({
                "id": len(annotations) + 1, "image_id": image_id, "category_id": category,
                "bbox": [x, y, 26, 24], "segmentation": corners, "area": 26 * 24, "iscrowd": 0,
            })  # fmt: skip
        file = root / split / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    truth = {"images": images, "annotations": annotations, "categories": CATEGORIES}
    (root / f"{split}.json").write_text(json.dumps(truth))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("coco")
    for split in IDS:
        write_split(root, split)
    return root


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    succeeds("train", *OWN, "--data", data, "--output_dir", folder)
    return folder


def average_precision(truth, results, kind):
    """AP in percent, by pycocotools."""
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = cocoeval.COCOeval(truth, truth.loadRes(str(results)), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return 100 * evaluation.stats[0]


def test_pycocotools_finds_the_ap_of_evaluation(run, data, caplog):
    """By the ids of the user's file, with no score threshold and 100 detections on both sides."""
    found = ("--format", "coco", "--score", "0", "--output-file", "found.json")
    ended = vil("predict", "--run", run, data / "val", *found)
    assert ended.code == 0, ended.err
    assert vil("evaluate", "--run", run, "DATALOADER.BSZ=1").code == 0
    rows = json.loads(Path("found.json").read_text())
    assert {row["image_id"] for row in rows} <= set(IDS["val"])
    assert {row["category_id"] for row in rows} <= {4, 17, 90}
    assert f"the image ids are those of {data / 'val.json'}, which" in caplog.text
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco.COCO(str(data / "val.json"))
    metrics = results(run)["coco"]
    for kind, name in (("bbox", "box_ap"), ("segm", "mask_ap")):
        assert average_precision(truth, "found.json", kind) == pytest.approx(metrics[name])
        assert metrics[name] > 0
    assert list(metrics["per_class"]) == ["box_ap", "mask_ap"]
    assert list(metrics["per_class"]["box_ap"]) == ["dog", "cat", "owl"]


def test_ids_may_be_strings(run, data, tmp_path):
    """In the predictions, and in the files of an evaluation, which finds the same metrics."""
    (tmp_path / "val").symlink_to(data / "val")
    truth = json.loads((data / "val.json").read_text())
    for row in truth["images"]:
        row["id"] = f"x{row['id']:09}"
    for row in truth["annotations"]:
        row["image_id"] = f"x{row['image_id']:09}"
    (tmp_path / "val.json").write_text(json.dumps(truth))
    words = ("--run", run, f"DATA.PATH={tmp_path}", f"DATA.KWARGS.extra_roots={data}")
    found = succeeds("predict", *words, data / "val", "--format", "coco", "--score", "0")
    ids = {row["id"] for row in truth["images"]}
    assert {row["image_id"] for row in json.loads(found)} <= ids
    succeeds("evaluate", *words, "--output_dir", "out", "--pictures", 1)
    rows = json.loads(Path("out/eval/coco_segm.json").read_text())
    assert {row["image_id"] for row in rows} <= ids
    Path("rows.json").write_text(json.dumps(rows))
    with contextlib.redirect_stdout(io.StringIO()):
        whole = coco.COCO(str(tmp_path / "val.json"))
    metrics = results("out")["coco"]
    assert average_precision(whole, "rows.json", "segm") == pytest.approx(metrics["mask_ap"])
    assert metrics["mask_ap"] > 0


def test_an_image_that_is_listed_twice_has_no_clear_id(run, data, tmp_path, caplog):
    (tmp_path / "val").symlink_to(data / "val")
    truth = json.loads((data / "val.json").read_text())
    truth["images"].append(truth["images"][0] | {"id": 5})
    (tmp_path / "val.json").write_text(json.dumps(truth))
    words = ("--run", run, f"DATA.PATH={tmp_path}", f"DATA.KWARGS.extra_roots={data}")
    found = json.loads(succeeds("predict", *words, data / "val", "--format", "coco"))
    assert [image["id"] for image in found["images"]] == [1, 2, 3]
    assert f"not those of {tmp_path / 'val.json'}, which lists an image twice" in caplog.text


def test_other_images_are_a_file_of_annotations(run, data, caplog):
    """With the category ids of training; ids of images count from 1."""
    Image.open(data / "val/part 0/0.png").resize((50, 60)).save("0.png")
    words = ("--format", "coco", "--score", "0")
    found = json.loads(succeeds("predict", "--run", run, "0.png", *words))
    assert found["images"] == [{"id": 1, "file_name": "0.png", "width": 50, "height": 60}]
    assert found["categories"] == sorted(CATEGORIES, key=lambda row: row["id"])
    assert {row["image_id"] for row in found["annotations"]} <= {1}
    # a run without its data, and one that did not record the ids
    plain = vil("predict", "--run", run, "0.png", *words, "DATA.PATH=nowhere",
                "DETECTION.CATEGORY_IDS=[]")  # fmt: skip
    assert plain.code == 0
    assert "the image ids are not those of a test set: there is no annotation" in caplog.text
    assert [row["id"] for row in json.loads(plain.out)["categories"]] == [1, 2, 3]


def prediction(file, size=(60, 50), labels=(1,)):
    torch = pytest.importorskip("torch")
    boxes = torch.tensor([[1.0, 2.0, 11.0, 22.0]] * len(labels))
    return Prediction(file, size, Detections(boxes, torch.tensor(labels), torch.ones(len(labels))))


def written(predictions, images, category_ids=(4, 17), known=(4, 17)):
    """What is written for an annotation file of these images."""
    options = dict(category_ids=known, listings=lambda: [Listing(images, category_ids)])
    return json.loads("".join(as_coco(predictions, ["a", "b"], **options)))


@pytest.mark.parametrize("image_id", [0, -3, 5_000_000_000, "000a"])
def test_ids_are_those_of_the_file(image_id):
    """Of any kind; the file name may be any part of the path."""
    images = {"x/1.png": (image_id, (60, 50)), "1.png": (77, (60, 50))}
    (row,) = written([prediction("photos/x/1.png")], images)
    assert (row["image_id"], row["category_id"]) == (image_id, 4)
    (row,) = written([prediction("photos/y/1.png")], images)
    assert row["image_id"] == 77


@pytest.mark.parametrize(
    "predictions",
    [
        [prediction("1.png"), prediction("2.png")],  # one is not listed
        [prediction("1.png", size=(50, 60))],  # another image of the same name
        [prediction("a/1.png"), prediction("b/1.png")],  # two for one id
    ],
)
def test_images_without_a_clear_id_are_a_file_of_annotations(predictions):
    found = written(predictions, {"1.png": (9, (60, 50))})
    assert [image["id"] for image in found["images"]] == [*range(1, len(predictions) + 1)]


@pytest.mark.parametrize("same", [True, False])
def test_another_image_of_the_same_name_and_size_has_no_id(same, tmp_path, caplog):
    for folder, content in (("val", b"listed"), ("photos", b"listed" if same else b"others")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.png").write_bytes(content)
    listing = Listing({"1.png": (9, (60, 50))}, (4, 17), Path("val.json"), tmp_path / "val")
    predictions = [prediction(str(tmp_path / "photos/1.png"))]
    found = json.loads("".join(as_coco(predictions, ["a", "b"], listings=lambda: [listing])))
    assert isinstance(found, list) == same
    (message,) = caplog.messages
    assert ("ids are those of val.json" if same else "not the image that val.json") in message


def test_unreadable_images_are_left_out():
    broken = Prediction("2.png", error="broken")
    assert len(written([broken, prediction("1.png")], {"1.png": (9, (60, 50))})) == 1
    found = written([broken, prediction("1.png")], {})
    assert [image["id"] for image in found["images"]] == [2]
    assert written([broken], {})["images"] == []


def test_a_class_that_the_file_lacks_keeps_its_id_if_it_is_free():
    images = {"1.png": (9, (60, 50))}
    rows = written([prediction("1.png", labels=(1, 2))], images, (30, None))
    assert [row["category_id"] for row in rows] == [30, 17]
    rows = written([prediction("1.png", labels=(1, 2))], images, (17, None))
    assert [row["category_id"] for row in rows] == [17]
