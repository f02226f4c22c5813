"""Labels mean the same in every source: folders, tars, tables, shards, Hugging Face datasets."""

import itertools
import json
import unicodedata

import numpy as np
import pytest

from tests.common.built import task_of
from tests.common.data_files import png_bytes, write_shard
from vil.config import get_config
from vil.data import build_dataset
from vil.data.classes import match_classes
from vil.engine.distributed import DistInfo
from vil.utils.errors import DataError
from vil.utils.extras import is_installed

SOURCES = ["folder", "tar", "table", "parquet", "shards", "hf"]
NFC, NFD = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))
EXTRA = {"parquet": "pyarrow", "hf": "datasets"}


@pytest.fixture(params=SOURCES)
def source(request):
    return skip_without_library(request.param)


def skip_without_library(source):
    if source in EXTRA and not is_installed(EXTRA[source]):
        pytest.skip(f"needs {EXTRA[source]}")
    return source


def write_images(root, count):
    for number in range(count):
        (root / f"{number}.png").write_bytes(png_bytes(number))


def open_source(root, source, splits, *, split="train", **own):
    """Write {split: labels of its images} in the format of `source`, and open one split. A label is
    a text, or a list of labels or numbers. Image i of all splits together is png_bytes(i)."""
    root.mkdir(exist_ok=True)
    rows = [(name, label) for name, labels in splits.items() for label in labels]
    if source in ("folder", "tar"):
        for number, (name, label) in enumerate(rows):
            (root / name / label).mkdir(parents=True, exist_ok=True)
            (root / name / label / f"{number:02}.png").write_bytes(png_bytes(number))
        if source == "tar":
            for name in splits:
                files = sorted((root / name).rglob("*.png"))
                members = {str(file.relative_to(root / name)): file.read_bytes() for file in files}
                write_shard(root / f"{name}.tar", members)
        return build_dataset(source, root, split, **own)
    if source == "shards":
        field = {"labels": "labels", "numbers": "value"}.get(own.get("target_type"), "label")
        for name in splits:
            members = {}
            for number, (part, label) in enumerate(rows):
                if part == name:
                    members[f"{number:02}.png"] = png_bytes(number)
                    members[f"{number:02}.json"] = json.dumps({field: label})
            write_shard(root / f"s-{name}.tar", members)
        return build_dataset("s-{split}.tar", root, split, **own)
    if source == "hf":
        return open_hf(root, rows, splits, split, **own)
    write_images(root, len(rows))
    columns = dict(
        path=[f"{number}.png" for number in range(len(rows))],
        label=[label if isinstance(label, str) else label[0] for _, label in rows],
        split=[name for name, _ in rows],
    )
    if source == "parquet":
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.table(columns), root / "t.parquet")
        return build_dataset("t.parquet", root, split, **own)
    lines = [",".join(map(str, row)) for row in zip(*columns.values())]
    (root / "t.csv").write_text("\n".join(["path,label,split", *lines]))
    return build_dataset("t.csv", root, split, **own)


def open_hf(root, rows, splits, split, **own):
    from datasets import Dataset, DatasetDict, Features, Image, List, Value

    values = {"class": Value("string"), "labels": List(Value("string"))}
    kind = own.get("target_type", "class")
    features = Features(image=Image(), label=values.get(kind, List(Value("float64"))))
    parts = {
        name: Dataset.from_dict(
            {
                "image": [
                    {"bytes": png_bytes(number), "path": None}
                    for number, (part, _) in enumerate(rows)
                    if part == name
                ],
                "label": [label for part, label in rows if part == name],
            },
            features=features,
        )
        for name in splits
    }
    DatasetDict(parts).save_to_disk(root / "hf")
    return build_dataset("hf/", root, split, **own)


def names_by_image(dataset):
    """Return {image as bytes: name of its class}."""
    return {dataset.content(i): dataset.classes[target] for i, target in enumerate(dataset.targets)}


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.permutations(SOURCES, 2)))
def test_numbers_as_class_names_are_matched_by_name(ours, theirs, tmp_path):
    """Folders sort 0..11 as texts, and tables as numbers."""
    labels = [str(number) for number in range(12)]
    model, data = (
        open_source(tmp_path / name, skip_without_library(name), {"train": labels})
        for name in (ours, theirs)
    )
    before = names_by_image(data)
    match_classes(data, model.classes, "val")
    assert data.classes == model.classes
    assert names_by_image(data) == before == names_by_image(model)


def test_training_sets_with_numbers_as_names_are_joined_by_name(tmp_path):
    labels = [str(number) for number in range(12)]
    open_source(tmp_path, "folder", {"train": labels})
    open_source(tmp_path, "table", {"train": labels})
    words = [f"DATA.PATH={tmp_path}", "DATA.NUM_CLASSES=12", "DATALOADER.BSZ=4"]
    for names in ("[t.csv,folder]", "[folder,t.csv]"):
        task = task_of(get_config(None, [*words, f"DATA.TRAIN={names}", f"DATA.TEST={names}"]))
        data = task.train_loader(DistInfo()).samples.dataset
        first, second = np.split(np.arange(24), 2)
        images = {data.content(i): data.targets[i] for i in first}
        assert all(images[data.content(i)] == data.targets[i] for i in second)


@pytest.mark.parametrize("forms", [(NFC, NFD), (NFD, NFC)])
def test_splits_in_two_unicode_forms_have_the_same_classes(source, forms, tmp_path, caplog):
    splits = {"train": [forms[0], "tea"], "val": ["tea", forms[1]]}
    train, val = (
        open_source(tmp_path / part, source, splits, split=part) for part in ("train", "val")
    )
    assert train.classes == val.classes == [NFC, "tea"]
    assert sorted(names_by_image(val).values()) == [NFC, "tea"]
    assert "Unicode" not in caplog.text


def test_two_unicode_forms_in_a_split_are_one_class(source, tmp_path, caplog):
    data = open_source(tmp_path / "data", source, {"train": [NFC, NFD, "tea", NFD]})
    assert data.classes == [NFC, "tea"]
    assert sorted(data.targets.tolist()) == [0, 0, 0, 1]
    assert caplog.text.count("two Unicode forms (NFC and NFD): both are one class") == 1


@pytest.mark.parametrize("source", ["table", "parquet", "shards", "hf"])
def test_labels_in_two_unicode_forms_are_one_label(source, tmp_path):
    labels = [[NFC], [NFD], ["tea"]]
    splits = {"train": labels}
    data = open_source(tmp_path / "d", skip_without_library(source), splits, target_type="labels")
    assert data.classes == [NFC, "tea"]
    assert data.targets.tolist() == [[1, 0], [1, 0], [0, 1]]


@pytest.mark.parametrize("source", ["table", "parquet", "shards", "hf"])
def test_labels_that_are_integers_are_sorted_by_value(source, tmp_path):
    splits = {"train": [["10"], ["9"], ["2"]]}
    data = open_source(tmp_path / "d", skip_without_library(source), splits, target_type="labels")
    assert data.classes == ["2", "9", "10"]
    assert data.targets.tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("labels", [[[1, 0], [0, 1]], [[1, 0, 1], [0]]], ids=["equal", "repeat"])
@pytest.mark.parametrize("source", ["shards", "hf"])
def test_lists_of_0_and_1_are_not_names(source, labels, tmp_path):
    splits = {"train": [list(map(str, row)) for row in labels]}
    with pytest.raises(DataError, match="2 of 2 .* have lists of 0 and 1 instead of label names"):
        open_source(tmp_path, skip_without_library(source), splits, target_type="labels")


@pytest.mark.parametrize("forms", [(NFC, NFD), (NFD, NFC)])
def test_a_model_in_another_unicode_form_keeps_its_classes(source, forms, tmp_path):
    data = open_source(tmp_path / "data", source, {"train": ["tea", forms[0]]})
    match_classes(data, ["tea", forms[1]], "val")
    assert data.classes == ["tea", forms[1]]
    assert sorted(names_by_image(data).values()) == sorted(["tea", forms[1]])


def test_lists_of_classes_refuse_two_unicode_forms(tmp_path):
    (tmp_path / "classes.txt").write_text(f"{NFC}\n{NFD}\n")
    with pytest.raises(DataError, match="two Unicode forms"):
        open_source(tmp_path, "shards", {"train": ["0", "1"]})


@pytest.mark.parametrize("forms", [(NFC, NFD), (NFD, NFC)])
def test_a_file_in_another_unicode_form_is_named(forms, tmp_path):
    (tmp_path / f"{forms[0]}.png").write_bytes(png_bytes(0))
    (tmp_path / "t.csv").write_text(f"path,label\n{forms[1]}.png,a\n")
    with pytest.raises(DataError, match="differs only in its Unicode form, NFC or NFD: rename it"):
        build_dataset("t.csv", tmp_path, "train")


@pytest.mark.parametrize("source", ["table", "parquet", "shards", "hf"])
def test_numbers_are_kept_exactly(source, tmp_path):
    values = [16777217.0, 0.1, 1.7e9 + 0.25, -3.0]
    splits = {"train": [[value] for value in values]}
    data = open_source(tmp_path / "d", skip_without_library(source), splits, target_type="numbers")
    assert data.targets.dtype == data[0][1].dtype == np.float64
    assert data.targets[:, 0].tolist() == values


@pytest.mark.parametrize("joined", ["{} {}", "{},{}", "{};{}", "{}/{}", "['{}', '{}']"])
@pytest.mark.parametrize("source", ["table", "parquet", "shards", "hf"])
def test_another_separator_of_labels_is_named(source, joined, tmp_path, caplog):
    pairs = [joined.format(*pair) for pair in itertools.permutations(["scab", "rust", "rot"], 2)]
    if source == "table":
        pairs = [f'"{pair}"' for pair in pairs]
    own = dict(split="train", target_type="labels")
    open_source(
        tmp_path / "d", skip_without_library(source), {"train": [[pair] for pair in pairs]}, **own
    )
    (line,) = [record.getMessage() for record in caplog.records]
    assert "so each text is one label, but texts" in line
    assert "separator" in line
    assert ("DATA.KWARGS.separator" in line) == (source in ("table", "parquet"))


@pytest.mark.parametrize(
    "labels",
    [["golden retriever", "bull dog"], ["scab|rust", "a,b"], ["cat", "dog"]],
    ids=["words", "used", "plain"],
)
def test_a_separator_that_is_used_or_absent_is_not_mentioned(labels, tmp_path, caplog):
    quoted = [[f'"{label}"'] for label in labels]
    open_source(tmp_path / "d", "table", {"train": quoted}, target_type="labels")
    assert not caplog.records
