"""Folders of boxes in the layouts of COCO, Roboflow, YOLO and Pascal VOC are read directly."""

import json
import re
import unicodedata

import numpy as np
import pytest
from PIL import Image

import vil
from tests.common.built import task_of
from tests.common.marks import cases
from tests.common.small_runs import metrics
from tests.common.small_runs import vil as run_vil
from tests.common.small_tasks import DETECTOR
from vil.config import get_config
from vil.engine.distributed import DistInfo
from vil.tasks import with_num_classes
from vil.tasks.detection.data.datasets import build_detection_set
from vil.utils.errors import DataError

SIDES = ((64, 32), (32, 64), (64, 64), (128, 64))
CLASSES = ["cat", "dog", "eel"]
SPLITS = {"train": 8, "val": 4}
WORDS = (
    *DETECTOR, "DETECTION.MODEL=faster_rcnn", "DATA.TRAIN=[folder]", "DATA.TEST=[folder]",
    "DATA.KWARGS={}", "DATA.NUM_CLASSES=auto", "DATALOADER.WORKERS=0", "OPTIM.EPOCHS=1",
)  # fmt: skip


def scene(split, number):
    """Pixels, size and objects [(class, (x, y, w, h))] of an image; integer boxes."""
    random = np.random.default_rng((number, len(split)))
    width, height = SIDES[number % len(SIDES)]
    objects = []
    for count in range(1 + number % 3):
        w, h = (int(random.integers(6, side // 2)) for side in (width, height))
        x, y = (int(random.integers(0, side - s + 1)) for side, s in ((width, w), (height, h)))
        objects.append((int((number + count) % len(CLASSES)), (x, y, w, h)))
    pixels = random.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels), (width, height), objects


def scenes_of(split):
    return {f"{split}{number}.png": scene(split, number) for number in range(SPLITS[split])}


def shuffled(images):
    """The images in another order, because their order in a file must not matter."""
    return dict(sorted(images.items(), key=lambda item: item[0][::-1], reverse=True))


def corners(x, y, w, h):
    return [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]


def save_images(folder, images):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (image, *_) in images.items():
        image.save(folder / name)


def coco_content(images):
    content = {"images": [], "annotations": []}
    content["categories"] = [{"id": i, "name": name} for i, name in enumerate(CLASSES, 1)]
    for name, (_, (width, height), objects) in images.items():
        number = len(content["images"])
        row = {"id": number, "file_name": name, "width": width, "height": height}
        content["images"].append(row)
        content["annotations"] += [
            dict(
                id=100 * number + i,
                image_id=number,
                category_id=label + 1,
                bbox=list(box),
                area=box[2] * box[3],
                iscrowd=0,
                segmentation=[np.ravel(corners(*box)).tolist()],
            )
            for i, (label, box) in enumerate(objects)
        ]
    return content


def write_coco(root, pattern, images_in, names):
    for split, name in names.items():
        save_images(root / images_in.format(name), scenes_of(split))
        file = root / pattern.format(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(coco_content(shuffled(scenes_of(split)))))


def yolo_lines(size, objects, polygons):
    for label, box in objects:
        points = np.array(corners(*box)) / size
        low, high = points.min(axis=0), points.max(axis=0)
        numbers = points.ravel() if polygons else [*(low + high) / 2, *(high - low)]
        yield " ".join([str(label), *(repr(float(number)) for number in numbers)])


def write_yolo(root, images_in, names, prefix="", polygons=False):
    lines = [f"names: [{', '.join(CLASSES)}]", f"nc: {len(CLASSES)}"]
    for split, name in names.items():
        images = images_in.format(name)
        save_images(root / images, scenes_of(split))
        labels = root / images.replace("images", "labels")
        labels.mkdir(parents=True)
        for file, (_, size, objects) in scenes_of(split).items():
            text = "\n".join(yolo_lines(size, objects, polygons))
            (labels / file).with_suffix(".txt").write_text(text)
        lines.append(f"{split}: {prefix}{images}")
    (root / "data.yaml").write_text("\n".join(lines))


def voc_text(file, size, objects, first=1):
    """first: number of the first pixel; 0 for edges that count from 0, as CVAT writes them."""
    parts = [f"<filename>{file}</filename>"]
    parts.append("<size><width>{}</width><height>{}</height></size>".format(*size))
    for label, (x, y, w, h) in objects:
        numbers = dict(xmin=x + first, ymin=y + first, xmax=x + w, ymax=y + h)
        box = "".join(f"<{key}>{number}</{key}>" for key, number in numbers.items())
        parts.append(f"<object><name>{CLASSES[label]}</name><bndbox>{box}</bndbox></object>")
    return f"<annotation>{''.join(parts)}</annotation>"


def write_voc(root):
    for name in ("Annotations", "ImageSets/Main"):
        (root / name).mkdir(parents=True)
    for split in SPLITS:
        images = scenes_of(split)
        save_images(root / "JPEGImages", images)
        for file, (_, *rest) in images.items():
            (root / "Annotations" / file).with_suffix(".xml").write_text(voc_text(file, *rest))
        stems = [file.removesuffix(".png") for file in shuffled(images)]
        (root / f"ImageSets/Main/{split}.txt").write_text("\n".join(stems))


def write_voc_beside(root):
    """The XML files beside the images, as Roboflow writes them."""
    for split, name in VALID.items():
        save_images(root / name, scenes_of(split))
        for file, (_, *rest) in scenes_of(split).items():
            (root / name / file).with_suffix(".xml").write_text(voc_text(file, *rest))


SAME = {"train": "train", "val": "val"}
VALID = {"train": "train", "val": "valid"}
LAYOUTS = {
    "COCO 2017": lambda root: write_coco(root, "annotations/instances_{}2017.json", "{}2017", SAME),
    "COCO": lambda root: write_coco(root, "annotations/instances_{}.json", "images/{}", SAME),
    "COCO beside": lambda root: write_coco(root, "{}.json", "{}", SAME),
    "Roboflow": lambda root: write_coco(root, "{}/_annotations.coco.json", "{}", VALID),
    "YOLO": lambda root: write_yolo(root, "images/{}", SAME),
    "YOLO polygons": lambda root: write_yolo(root, "images/{}", SAME, polygons=True),
    "YOLO of Roboflow": lambda root: write_yolo(root, "{}/images", VALID, "../"),
    "Pascal VOC": write_voc,
    "Pascal VOC of Roboflow": write_voc_beside,
}
WITH_MASKS = ("COCO 2017", "COCO", "COCO beside", "Roboflow", "YOLO polygons")


@pytest.fixture
def written(tmp_path):
    """A function that writes a layout, and returns its folder."""

    def write(layout):
        root = tmp_path / layout.replace(" ", "_")
        root.mkdir()
        LAYOUTS[layout](root)
        return root

    return write


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_images_and_targets(layout, written):
    root, masks = written(layout), layout in WITH_MASKS
    for split in SPLITS:
        found = build_detection_set("folder", root, split, masks=masks)
        assert found.classes == CLASSES
        names = [found.sample_name(index).split("/")[-1] for index in range(len(found))]
        assert names == list(scenes_of(split))
        for (pixels, target), (image, _, objects) in zip(found, scenes_of(split).values()):
            assert (pixels.permute(1, 2, 0).numpy() == np.asarray(image)).all()
            expected = [[x, y, x + w, y + h] for _, (x, y, w, h) in objects]
            assert target["boxes"].tolist() == expected
            assert target["labels"].tolist() == [label + 1 for label, _ in objects]
            for mask, (x1, y1, x2, y2) in zip(target.get("masks", ()), expected):
                assert mask[y1:y2, x1:x2].all()
                assert mask.sum() == (x2 - x1) * (y2 - y1)


def first_loss(root, run):
    vil.train(None, WORDS, data=root, output_dir=run)
    return metrics(run, "train")[0]["loss"]


@pytest.mark.long
def test_the_first_loss_is_the_same_bit_for_bit(written, tmp_path):
    layouts = ("Roboflow", "YOLO", "Pascal VOC")
    losses = {name: first_loss(written(name), tmp_path / f"run {name}") for name in layouts}
    assert len(set(losses.values())) == 1, losses


COMMANDS = {
    "data check": lambda root: ("data", "check", "--data", root, *WORDS),
    "dry run": lambda root: ("train", "--data", root, *WORDS, "--dry-run", "--output_dir", "run"),
    "detect check": lambda root: ("detect", "check", root),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "layout",
    cases(["Roboflow", "YOLO of Roboflow", "Pascal VOC"], ["YOLO of Roboflow", "Pascal VOC"]),
)
def test_commands_take_the_folder(layout, command, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run_vil(*COMMANDS[command](written(layout).relative_to(tmp_path)))
    assert ended.code == 0, ended.err
    assert "cat" in ended.out
    if command == "detect check":
        assert "8, 0 of them without a usable box" in ended.out
        assert "4, 0 of them without a usable box" in ended.out


def test_the_recipe_needs_only_the_path(written):
    for layout in ("Roboflow", "YOLO", "Pascal VOC"):
        words = [f"DATA.PATH={written(layout)}", "DATALOADER.BSZ=2", "DATALOADER.WORKERS=0"]
        task = task_of(with_num_classes(get_config("own/faster_rcnn_vil_nano.yaml", words)))
        assert task.train_loader(DistInfo()).samples.dataset.classes == CLASSES
        assert len(task.test_loaders(DistInfo())["folder"].dataset) == SPLITS["val"]


def test_a_test_split_is_used_if_there_is_a_validation_set(written):
    root = written("Roboflow")
    (root / "valid").rename(root / "test")
    words = [*WORDS, f"DATA.PATH={root}", "DATA.VAL=[folder]", "DATA.VAL_FRACTION=0.5"]
    task = task_of(with_num_classes(get_config(None, words)))
    assert len(task.train_loader(DistInfo()).samples.dataset) == SPLITS["train"] / 2
    (val,), (test,) = (task.test_loaders(DistInfo(), part=p).values() for p in ("val", "test"))
    assert len(val.dataset) == SPLITS["train"] / 2
    assert [test.dataset.sample_name(i) for i in range(len(test.dataset))] == list(scenes_of("val"))


@pytest.mark.parametrize("layout", ["Roboflow", "YOLO", "Pascal VOC"])
def test_the_set_coco_names_the_set_for_other_layouts(layout, written):
    root = written(layout)
    with pytest.raises(DataError, match="set DATA.TRAIN and DATA.TEST to folder"):
        build_detection_set("coco", root, "train", masks=False)


def test_a_name_in_two_unicode_forms_is_one_class(written):
    root = written("Pascal VOC")
    for number, form in {0: "NFC", 2: "NFD"}.items():
        file = root / f"Annotations/train{number}.xml"
        name = unicodedata.normalize(form, "f\u00e9e")
        file.write_text(file.read_text().replace("<name>cat", f"<name>{name}"), "utf-8")
    found = build_detection_set("folder", root, "train", masks=False)
    assert found.classes == [*CLASSES, "f\u00e9e"]


def test_difficult_objects_are_crowds(written):
    root = written("Pascal VOC")
    file = root / "Annotations/train1.xml"
    text = file.read_text()
    file.write_text(text.replace("</name>", "</name><difficult>1</difficult>", 1))
    found = build_detection_set("folder", root, "train", masks=False)
    assert len(found[1][1]["labels"]) == len(scene("train", 1)[2]) - 1
    rows = json.loads(found.annotations.text)["annotations"]
    assert [row["id"] for row in rows if row["iscrowd"]] == ["Annotations/train1.xml, object 1"]


@pytest.mark.parametrize("sign", ["a zero", "fractions"])
def test_edges_of_voc_files_that_count_from_0(sign, written):
    """As CVAT writes them: a 0, or fractions, say so."""
    root = written("Pascal VOC")
    offset = 0 if sign == "a zero" else 0.25
    for file, (_, size, objects) in scenes_of("train").items():
        boxes = [(label, (x + offset, y + offset, w, h)) for label, (x, y, w, h) in objects]
        if sign == "a zero":
            boxes[0] = boxes[0][0], (0, 0, 8, 8)
        text = voc_text(file, size, boxes, first=0)
        (root / "Annotations" / file).with_suffix(".xml").write_text(text)
    found = build_detection_set("folder", root, "train", masks=False)
    _, (x, y, w, h) = boxes[-1]
    assert len(found.annotations.notes) == 1
    rows = json.loads(found.annotations.text)["annotations"]
    assert [x, y, w, h] in [row["bbox"] for row in rows]


@pytest.mark.parametrize("layout", ["Pascal VOC", "Pascal VOC of Roboflow"])
def test_all_splits_of_voc_files_count_alike(layout, written):
    """A single 0 is a slip if more boxes begin at 1, and never shifts one split only."""
    root = written(layout)
    before = {s: build_detection_set("folder", root, s, masks=False).boxes for s in SPLITS}
    files = {file.stem: file for file in root.rglob("*.xml")}
    pattern = re.compile(r"<xmin>\d+</xmin>")

    def boxes_with(first, stems):
        for stem in stems:
            text = pattern.sub(f"<xmin>{first}</xmin>", files[stem].read_text(), count=1)
            files[stem].write_text(text)
        return {s: build_detection_set("folder", root, s, masks=False) for s in SPLITS}

    boxes_with(1, ["train1", "train2", "val0"])
    found = boxes_with(0, ["val1"])
    for split in SPLITS:
        (note,) = found[split].annotations.notes
        assert "1 of 22 boxes begin at 0, but 3 at 1" in note
        assert (found[split].boxes[:, 1:] == before[split][:, 1:]).all()
    found = boxes_with(0, ["val2", "val3"])
    for split in SPLITS:  # edges, in both splits
        assert (found[split].boxes[:, 1] == before[split][:, 1] + 1).all()
        assert "edges that count from 0" in found[split].annotations.notes[0]


def edit(path, change):
    def apply(root):
        file = root / path
        file.write_text(change(file.read_text()))

    return apply


BOMB = '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;&b;&b;">]>'
YOLO_LABELS, VOC_FILE = "labels/train/train1.txt", "Annotations/train1.xml"
# what is wrong -> layout, change, parts of the message
FAULTS = {
    "broken XML": (
        "Pascal VOC", edit(VOC_FILE, lambda text: text[:-20]), (VOC_FILE, "is not valid XML"),
    ),
    "a document type": (
        "Pascal VOC", edit(VOC_FILE, lambda text: BOMB + text), (VOC_FILE, "remove it"),
    ),
    "large XML": (
        "Pascal VOC", edit(VOC_FILE, lambda text: text + " " * (1 << 22)), (VOC_FILE, "KiB"),
    ),
    "no XML": (
        "Pascal VOC", lambda root: (root / VOC_FILE).unlink(), (VOC_FILE, "there is no file"),
    ),
    "an object without a box": (
        "Pascal VOC", edit(VOC_FILE, lambda text: text.replace("xmin", "left")),
        (VOC_FILE, "object 1 has no bndbox"),
    ),
    "a path out of the folder": (
        "Pascal VOC", edit("ImageSets/Main/train.txt", lambda text: "../../etc/passwd"),
        ("is not below",),
    ),
    "no image": (
        "Pascal VOC", lambda root: (root / "JPEGImages/train1.png").unlink(),
        ("train1.png", "are missing from"),
    ),
    "four numbers": (
        "YOLO", edit(YOLO_LABELS, lambda text: "0 0.5 0.5 0.2\n"),
        (f"{YOLO_LABELS}, line 1 has 4 numbers", "expected: class x y width height"),
    ),
    "words": ("YOLO", edit(YOLO_LABELS, lambda text: "cat 0.5 0.5 0.2 0.2"), (YOLO_LABELS,)),
    "a class out of range": (
        "YOLO", edit(YOLO_LABELS, lambda text: "3 0.5 0.5 0.2 0.2\n"),
        (f"{YOLO_LABELS}, line 1: class 3", "data.yaml"),
    ),
    "pixels": (
        "YOLO",
        lambda root: [f.write_text("0 20 20 9 9") for f in (root / "labels/train").iterdir()],
        ("outside of its image",),
    ),
    "a name too long for a file": (
        "Roboflow",
        edit("train/_annotations.coco.json", lambda t: t.replace("train1.png", "x" * 999 + "/1")),
        ("are missing from",),
    ),
    "a name with a zero": (
        "Roboflow",
        edit("train/_annotations.coco.json", lambda t: t.replace("train1.png", "a\\u0000b/1.png")),
        ("has a file_name that no file can have",),
    ),
    "no labels at all": (
        "YOLO", lambda root: (root / "labels/train").rename(root / "labels/other"),
        ("none of the 8 images", "labels/train/train0.txt"),
    ),
    "another nc": (
        "YOLO", edit("data.yaml", lambda text: text.replace("nc: 3", "nc: 4")),
        ("data.yaml", "nc is 4, but names has 3"),
    ),
    "a nested name": (
        "YOLO", edit("data.yaml", lambda text: text.replace("[cat", "[[cat, cat]")),
        ("data.yaml", "names must list"),
    ),
    "no folder of images": (
        "YOLO", edit("data.yaml", lambda text: text.replace("images/train", "nowhere")),
        ("data.yaml", "train names nowhere"),
    ),
    "broken YAML": ("YOLO", edit("data.yaml", lambda text: text + "\n]"), ("data.yaml", "YAML")),
    "no layout": ("YOLO", lambda root: (root / "data.yaml").unlink(), ("looked for COCO",)),
    "no such split": (
        "Pascal VOC", lambda root: (root / "ImageSets/Main/val.txt").unlink(),
        ("has no val images", "VAL_FRACTION"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_one_line(fault, written):
    layout, change, parts = FAULTS[fault]
    root = written(layout)
    change(root)
    split = "val" if fault == "no such split" else "train"
    with pytest.raises(DataError) as caught:
        build_detection_set("folder", root, split, masks=False)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def test_an_image_without_a_file_of_labels_has_no_objects(written):
    root = written("YOLO")
    (root / YOLO_LABELS).unlink()
    assert len(build_detection_set("folder", root, "train", masks=False)) == SPLITS["train"] - 1
    found = build_detection_set("folder", root, "train", masks=False, keep_empty=True)
    assert found[1][1]["boxes"].shape == (0, 4)


@pytest.mark.parametrize("numbers", [" 0.1 0.2" * 12, " 0.1 0.2 1" * 3])
def test_labels_with_keypoints_are_boxes(numbers, written, caplog):
    """Also if their count of numbers is that of a polygon."""
    root = written("YOLO")
    before = build_detection_set("folder", root, "train", masks=False)
    (root / "data.yaml").open("a").write("\nkpt_shape: [12, 2]")
    for file in (root / "labels/train").iterdir():
        file.write_text("".join(line + numbers + "\n" for line in file.read_text().splitlines()))
    found = build_detection_set("folder", root, "train", masks=False)
    np.testing.assert_array_equal(found.boxes, before.boxes)
    assert "data.yaml has kpt_shape: the keypoints of its labels are not used" in caplog.text
    with pytest.raises(DataError, match="no usable segmentation"):
        build_detection_set("folder", root, "train", masks=True)


def test_labels_without_an_image_are_named(written, caplog):
    root = written("YOLO")
    (root / "images/train/train1.png").unlink()
    assert len(build_detection_set("folder", root, "train", masks=False)) == SPLITS["train"] - 1
    assert "1 file of labels has no image, such as labels/train/train1.txt" in caplog.text


def test_an_unreadable_image_of_labels_is_named(written, caplog):
    root = written("YOLO")
    (root / "images/val/val1.png").write_bytes(b"no image")
    assert len(build_detection_set("folder", root, "val", masks=False)) == SPLITS["val"]
    assert "images/val/val1.png: repair or remove them" in caplog.text


def test_names_in_another_order_are_matched(written, tmp_path):
    """The classes of a run and those of other data are matched by their names."""
    root = written("YOLO")
    cfg = with_num_classes(get_config(None, [*WORDS, f"DATA.PATH={root}"]))
    task = task_of(cfg)
    task.class_names = list(reversed(CLASSES))
    found = task.test_loaders(DistInfo())["folder"].dataset
    assert found.classes == task.class_names
    for (_, target), (_, _, objects) in zip(found, scenes_of("val").values()):
        assert target["labels"].tolist() == [len(CLASSES) - label for label, _ in objects]


def test_a_category_without_objects_costs_nothing(written, tmp_path):
    root = written("Roboflow")
    for folder in ("train", "valid"):
        file = root / folder / "_annotations.coco.json"
        content = json.loads(file.read_text())
        content["categories"].insert(0, {"id": 0, "name": "animals", "supercategory": "none"})
        file.write_text(json.dumps(content))
    result = vil.train(None, WORDS, data=root, output_dir=tmp_path / "run")
    assert result.metrics["folder"]["box_ap"] >= 0
    assert (tmp_path / "run/classes.txt").read_text().splitlines() == ["animals", *CLASSES]
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("1 of 4 categories have no object, such as animals") == 1
    ended = run_vil("detect", "check", root)
    assert "no objects  animals: " in ended.out
    assert ended.code == 0


def test_label_studio_names_its_images_from_the_root(tmp_path):
    content = coco_content(scenes_of("train"))
    save_images(tmp_path / "images", scenes_of("train"))
    for row in content["images"]:
        row["file_name"] = f"images/{row['file_name']}"
    (tmp_path / "result.json").write_text(json.dumps(content))
    dataset = build_detection_set("folder", tmp_path, "train", None, masks=False)
    assert len(dataset) == len(scenes_of("train"))
    assert dataset.image(0).size
