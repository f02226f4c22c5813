"""DATA.VAL, VAL_FRACTION, TEST_FRACTION and FOLDS hold out images of a detection set."""

import json

import numpy as np
import pytest
from PIL import Image

import vil
from tests.common.built import task_of
from tests.common.small_runs import metrics
from tests.common.small_tasks import DETECTOR
from vil.config import get_config
from vil.engine.distributed import DistInfo
from vil.tasks import with_num_classes
from vil.tasks.detection.coco_eval import average_precision, load_truth
from vil.utils.errors import ConfigError
from vil.utils.json_text import to_json
from vil.workflows.check_data import check_data

NUM_IMAGES, NUM_EMPTY = 20, 4
WORDS = (
    *DETECTOR, "DETECTION.MODEL=faster_rcnn", "DATA.TRAIN=[folder]", "DATA.TEST=[folder]",
    "DATA.KWARGS={}", "DATA.NUM_CLASSES=auto", "DATALOADER.WORKERS=0", "OPTIM.EPOCHS=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One folder of images for training; the last images have no objects."""
    root = tmp_path_factory.mktemp("boxes")
    images, annotations = [], []
    for number in range(NUM_IMAGES):
        random = np.random.default_rng(number)
        pixels = random.integers(0, 256, (48, 64, 3), np.uint8)
        name = f"{number:02}.png"
        (root / "train").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(root / "train" / name)
        images.append({"id": 7 * number + 3, "file_name": name, "width": 64, "height": 48})
        for count in range(1 + number % 2 if number < NUM_IMAGES - NUM_EMPTY else 0):
            category = 1 + (number + count) % 2
            box = [*random.integers(0, 20, 2).tolist(), 20, 16]
            row = {"id": len(annotations), "image_id": 7 * number + 3, "bbox": box}
            annotations.append(row | {"category_id": category})
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "train/_annotations.coco.json").write_text(json.dumps(content))
    return root


def parts_of(root, *words):
    """The training, validation and test datasets."""
    cfg = with_num_classes(get_config(None, [*WORDS, f"DATA.PATH={root}", *words]))
    task = task_of(cfg)
    loader = task.train_loader(DistInfo())
    task.class_names = loader.classes
    found = [loader.samples.dataset]
    for part in ("val", "test"):
        found += [test.dataset for test in task.test_loaders(DistInfo(), part=part).values()]
    return found


def names(dataset):
    return {dataset.sample_name(index) for index in range(len(dataset))}


EVERY = {f"{number:02}.png" for number in range(NUM_IMAGES)}
EMPTY = {f"{number:02}.png" for number in range(NUM_IMAGES - NUM_EMPTY, NUM_IMAGES)}


def test_a_fraction_is_held_out(root):
    train, val, same = parts_of(root, "DATA.VAL_FRACTION=0.25")
    assert names(val) == names(same)
    assert len(val) == 5
    assert names(train) == EVERY - names(val) - EMPTY
    kept = parts_of(root, "DATA.VAL_FRACTION=0.25", "DETECTION.INPUT.KEEP_EMPTY=True")[0]
    assert names(kept) == EVERY - names(val)
    other = parts_of(root, "DATA.VAL_FRACTION=0.25", "DATA.SPLIT_SEED=1")[1]
    assert names(other) != names(val)


def test_targets_follow_their_images(root):
    whole = parts_of(root, "DATA.VAL=[]", "DATA.FOLDS=0", "DATA.VAL_FRACTION=0.05")[0]
    expected = {whole.sample_name(i): whole[i] for i in range(len(whole))}
    for dataset in parts_of(root, "DATA.VAL_FRACTION=0.4"):
        for index in range(len(dataset)):
            name = dataset.sample_name(index)
            if name in expected:
                target = dataset.target(index, 48, 64)
                assert target["image_id"] == 7 * int(name[:2]) + 3
                assert target["boxes"].shape == (1 + int(name[:2]) % 2, 4)
                assert dataset.sizes[index].tolist() == [64, 48]


def test_folds_cover_every_image_once(root):
    folds = [parts_of(root, "DATA.FOLDS=4", f"DATA.FOLD={fold}") for fold in range(4)]
    held_out = [name for _, val, _ in folds for name in sorted(names(val))]
    assert sorted(held_out) == sorted(EVERY)
    for train, val, _ in folds:
        assert names(train) == EVERY - names(val) - EMPTY
        assert set(val.labels.tolist()) == {1, 2}


def test_the_test_images_do_not_depend_on_the_validation_images(root):
    words = ("DATA.VAL=[folder]", "DATA.TEST_FRACTION=0.2")
    train, val, test = parts_of(root, *words, "DATA.VAL_FRACTION=0.25")
    assert names(train) | names(val) | names(test) | EMPTY == EVERY
    assert not names(val) & names(test)
    other = parts_of(root, *words, "DATA.VAL_FRACTION=0.5")
    assert names(other[2]) == names(test)
    assert names(other[1]) != names(val)


def test_copies_of_an_image_stay_together(root, tmp_path):
    file = root / "train/_annotations.coco.json"
    content = json.loads(file.read_text())
    (tmp_path / "train").mkdir()
    for row in content["images"]:
        number = int(row["file_name"][:2]) // 2
        image = (root / "train" / f"{number:02}.png").read_bytes()
        (tmp_path / "train" / row["file_name"]).write_bytes(image)
    (tmp_path / "train" / file.name).write_text(file.read_text())
    _, val, _ = parts_of(tmp_path, "DATA.VAL_FRACTION=0.3")
    numbers = sorted(int(name[:2]) for name in names(val))
    assert numbers == [n for pair in numbers[::2] for n in (pair, pair + 1)]


def test_a_run_with_a_test_at_its_end(root, tmp_path):
    words = ("DATA.VAL=[folder]", "DATA.TEST_FRACTION=0.2", "DATA.VAL_FRACTION=0.25")
    result = vil.train(None, [*WORDS, *words], data=root, output_dir=tmp_path / "run")
    assert result.test_metrics["folder"]["count"] == 4
    assert result.metrics["folder"]["count"] == 4
    (line,) = metrics(tmp_path / "run", "test/")
    assert 0 <= line["box_ap"] <= 100
    found = vil.evaluate(tmp_path / "run", output_dir=tmp_path)
    assert to_json(found) == to_json(result.test_metrics)


def test_the_average_precision_is_that_of_the_held_out_images(root, tmp_path):
    """The objects of other images are not missed objects."""
    _, val, _ = parts_of(root, "DATA.VAL_FRACTION=0.25")
    truth = load_truth(val.annotations, "bbox")
    assert {row["id"] for row in truth["images"]} == set(val.image_ids.tolist())
    rows = [
        {key: row[key] for key in ("image_id", "category_id", "bbox")} | {"score": 1.0}
        for row in truth["annotations"]
    ]
    assert average_precision(val.annotations, rows)["box_ap"] == pytest.approx(100)


def test_data_check_suggests_and_checks_a_fraction(root):
    cfg = get_config(None, [*WORDS, f"DATA.PATH={root}"])
    found = check_data(cfg)
    assert found.suggestions["DATA.VAL_FRACTION"] == 0.2
    assert not found.is_usable
    found = check_data(cfg, ["DATA.VAL_FRACTION=0.2"])
    assert found.is_usable
    assert found.splits["val/folder"].images.num_images == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("DATA.VAL_FRACTION=0.2", "DATA.TEST=[fake_boxes]"), "in both DATA.TRAIN"),
        (("DATA.VAL_FRACTION=0.2", "DATA.GROUP_BY=column"), "no group column"),
    ],
)
def test_contradictions_are_refused(root, words, text):
    with pytest.raises(ConfigError, match=text):
        parts_of(root, *words)
