"""Tar shards of images and labels: patterns, targets, classes, and everything that can be wrong."""

import json
import pickle

import pytest

from tests.common.built import task_of
from tests.common.data_files import png_bytes, write_shard, write_shards
from vil.config import get_config
from vil.data import build_dataset
from vil.data.formats import shards
from vil.data.formats.shards import find_shards
from vil.engine.distributed import DistInfo
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke


def members(labels, extension="cls", first=0):
    """Return {member: content} of samples 0, 1, ... with these labels."""
    pairs = {}
    for number, label in enumerate(labels, start=first):
        label = json.dumps(label) if extension == "json" else str(label)
        pairs |= {f"{number:04}.png": png_bytes(number), f"{number:04}.{extension}": label}
    return pairs


def read(root, labels, extension="cls", split="train", **own):
    write_shard(root / "x.tar", labels if isinstance(labels, dict) else members(labels, extension))
    return build_dataset("x.tar", root, split, **own)


def refusal(root, *args, error=DataError, **own):
    with pytest.raises(error) as caught:
        read(root, *args, **own)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ranges_and_wildcards(tmp_path):
    labels = ["cat", "dog", "cat", "eel"]
    for shard in range(4):
        write_shard(tmp_path / f"s/train-{shard:03}.tar", members(labels[shard:], first=10 * shard))
    name = "s/train-{000..002}.tar"
    data = build_dataset(name, tmp_path, "train")
    assert data.classes == ["cat", "dog", "eel"]
    assert data.targets.tolist() == [0, 1, 0, 2, 1, 0, 2, 0, 2]
    assert data.sample_name(4) == "train-001.tar@0010.png"
    assert [data.content(i) for i in (8, 0, 4)] == [png_bytes(i) for i in (21, 0, 10)]
    assert data[8][0].mode == "RGB"
    assert len(build_dataset("s/train-*.tar", tmp_path, "train")) == 10
    assert len(build_dataset("s/train-00{1..2}*.tar", tmp_path, "val", all_rows=True)) == 5
    found = find_shards([tmp_path], "s/train-{00..00}{2..3}.tar")
    assert [path.name for path in found] == ["train-002.tar", "train-003.tar"]
    (tmp_path / "s/train-001.tar").unlink()
    with pytest.raises(DataError, match=r"1 of 3 shards are missing, .*train-001\.tar"):
        build_dataset(name, tmp_path, "train")
    with pytest.raises(
        DataError, match=r"there is no file .*val-\*\.tar: add it, or train with DATA.VAL_FR"
    ):
        build_dataset("s/{split}-*.tar", tmp_path, "val")
    for bad in ("{3..1}", "{0..999999999}", "{0..9999}{0..9999}"):
        with pytest.raises(DataError, match="must name 1 to 100000 shards"):
            find_shards([tmp_path], f"s/{bad}.tar")
    with pytest.raises(DataError, match=r"3 of 6 shards are missing, .*train-001\*"):
        build_dataset("s/train-{000..005}*.tar", tmp_path, "train")
    with pytest.raises(DataError, match="which is not below"):
        build_dataset("../train-000.tar", tmp_path / "s/x", "train")


def test_splits_have_the_classes_of_train(tmp_path):
    write_shard(tmp_path / "train-0.tar", members(["10", "9", "2"]))
    write_shard(tmp_path / "val-0.tar", members(["10", "2"]))
    val = build_dataset("shards", tmp_path, "val")
    assert (val.classes, val.targets.tolist()) == (["2", "9", "10"], [2, 0])
    assert len(val) == 2
    write_shard(tmp_path / "val-0.tar", members(["10", "3"]))
    with pytest.raises(DataError, match="1 of 5 samples have a class that no training image has; "):
        build_dataset("shards", tmp_path, "val")


def test_a_list_of_classes(tmp_path, caplog):
    (tmp_path / "classes.txt").write_text("dog\ncat\neel\n")
    data = read(tmp_path, ["1", "cat", "0"])
    assert (data.classes, data.targets.tolist()) == (["dog", "cat", "eel"], [1, 1, 0])
    message = refusal(tmp_path, ["1", "3", "emu"])
    assert (
        "2 of 3 samples have a class that is not in the list of classes; the first in sample"
        in (message)
    )
    assert "sample x.tar@0001: '3'" in message
    (tmp_path / "other.txt").write_text("a\nb\n")
    assert read(tmp_path, ["1"], labelmap="other.txt").targets.tolist() == [1]
    assert "cannot be read" in refusal(tmp_path, ["1"], labelmap="none.txt")


def test_labels_and_numbers(tmp_path):
    data = read(tmp_path, ["cat\n \ndog", "", "dog\n"], "txt", target_type="labels")
    assert (data.classes, data.targets.tolist()) == (["cat", "dog"], [[1, 1], [0, 0], [0, 1]])
    own = dict(target_type="labels")
    data = read(tmp_path, [{"labels": [3, 1]}, {"labels": []}], "json", **own)
    assert (data.classes, data.targets.tolist()) == (["1", "3"], [[1, 1], [0, 0]])
    own = dict(target_type="numbers")
    data = read(tmp_path, [{"value": 0.1}, {"value": -3}], "json", **own)
    assert data.classes == ["value"]
    assert data.targets.tolist() == [[0.1], [-3]]
    data = read(tmp_path, ["1 2.5", " 3\t4\n"], "cls", **own)
    assert (data.classes, data.targets.tolist()) == (["value_0", "value_1"], [[1, 2.5], [3, 4]])


PLAIN = members(["a", "b", "a"])
BAD = {
    "no label": ({k: v for k, v in PLAIN.items() if k != "0001.cls"},
                 "1 of 3 samples have no label, a member cls; the first in sample x.tar@0001: 'p"),
    "no labels": ({k: v for k, v in PLAIN.items() if "cls" not in k}, "set DATA.TRAIN to tar"),
    "no image": ({k: v for k, v in PLAIN.items() if k != "0001.png"},
                 "1 of 3 samples have no image; the first in sample x.tar@0001: 'cls'"),
    "two images": (PLAIN | {"0002.mask.png": b"x"},
                   "1 of 3 samples have several images (set DATA.KWARGS.image_member"),
    "mixed members": (PLAIN | {"0003.png": b"x", "0003.json": '{"label": "a"}'},
                      "1 of 4 samples have no label, a member cls; the first in sample x.tar@0003"),
    "not UTF-8": (PLAIN | {"0001.cls": b"\xff"}, "1 of 3 samples have no valid cls; the first in"),
    "not JSON": (members([{"label": 1}], "json") | {"0000.json": "{"},
                 "1 of 1 samples have no valid json with the field 'label'; the first in sam"),
    "no field": (members([{"label": 1}, {"caption": "a"}], "json"), "1 of 2 samples have no valid"),
    "line break": (members([{"labels": ["a\nb"]}], "json"), "1 of 1 samples have a label with a"),
    "nothing": ({"README": "x", "a.npz": "x"}, "has no images and no labels"),
    "large": (PLAIN | {"0001.cls": "x" * (2 << 20)}, "1 of 3 samples have no valid cls"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_samples_are_counted(name, tmp_path):
    content, message = BAD[name]
    own = dict(target_type="labels") if name == "line break" else {}
    assert message in refusal(tmp_path, content, **own)


def test_what_is_no_tar_is_refused(tmp_path):
    (tmp_path / "y.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DataError, match="is not a tar"):
        build_dataset("y.tar", tmp_path, "train")
    said = refusal(tmp_path, ["a"], split="val")
    assert "x.tar has no val images, because all its samples are training images" in said
    assert "set DATA.VAL_FRACTION to 0.2" in said


def test_one_of_several_images_or_labels(tmp_path, caplog):
    content = PLAIN | {"0000.mask.png": b"x", "0000.npz": b"", "0000.meta.json": "{}"}
    content |= {f"000{n}.txt": f"kind {n}" for n in range(3)} | {"d/.hidden.png": b""}
    data = read(tmp_path, content, image_member="png", label_member="txt")
    assert data.classes == ["kind 0", "kind 1", "kind 2"]
    assert data.content(0) == png_bytes(0)
    assert "members are neither images nor labels, such as 0000.cls" in caplog.text


def test_more_shards_than_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_OPEN", 2)
    files = {f"c{n % 3}/{n}.png": png_bytes(n) for n in range(9)}
    write_shards(tmp_path, "train", files, count=3)
    data = build_dataset("shards", tmp_path, "train")
    assert sorted(data.content(i) for i in range(9)) == sorted(files.values())
    assert all(archive.file.opened is None for archive in data.archive.archives)
    assert pickle.loads(pickle.dumps(data)).content(4) == data.content(4)


def test_parts_of_shards_keep_copies_together(tmp_path):
    """Through the config: a fraction, identical images in one part, and counted classes."""
    for shard in range(2):
        labels = [f"k{n % 2}" for n in range(20)]
        write_shard(tmp_path / f"s-{shard}.tar", members(labels))  # the same images twice
    words = ["DATA.TRAIN=['s-{0..1}.tar']", "DATA.TEST=['s-{0..1}.tar']", "DATA.VAL_FRACTION=0.2"]
    words += ["DATA.NUM_CLASSES=2", "DATALOADER.BSZ=4", f"DATA.PATH={tmp_path}"]
    task = task_of(get_config(None, words))
    train = task.train_loader(DistInfo()).samples.dataset
    task.class_names = train.classes
    (val,) = task.test_loaders(DistInfo()).values()
    names = [{d.sample_name(i)[-8:] for i in range(len(d))} for d in (train, val.dataset)]
    assert (len(train), len(val.dataset)) == (32, 8)
    assert not names[0] & names[1]
