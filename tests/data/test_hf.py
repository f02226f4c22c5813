"""Folders of the library `datasets`: columns, splits, targets, and everything that can be wrong."""

import io
import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.common.data_files import png_bytes
from vil.data import build_dataset
from vil.utils.errors import DataError
from vil.utils.extras import is_installed

if is_installed("datasets"):
    import datasets
    import pyarrow
    import pyarrow.ipc
    from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

    datasets.disable_progress_bars()
needs_library = pytest.mark.skipif(not is_installed("datasets"), reason="needs vil[hf]")
NAMES = ["zebra", "ant", "cat"]


def rows(count=6, first=0, names=NAMES, **columns):
    """Return a Dataset of PNG images with a ClassLabel, and more columns {name: (type, values)}."""
    types = {"image": datasets.Image(), "label": ClassLabel(names=names)}
    types |= {name: type_ for name, (type_, _) in columns.items()}
    values = {
        "image": [{"bytes": png_bytes(first + i), "path": None} for i in range(count)],
        "label": [i % len(names) for i in range(count)],
    }
    values |= {name: given for name, (_, given) in columns.items()}
    return Dataset.from_dict(values, features=Features(types))


def saved(root, data, name="pets"):
    data.save_to_disk(root / name)
    return f"{name}/"


def refusal(root, data, split="train", **own):
    with pytest.raises(DataError) as caught:
        build_dataset(data if isinstance(data, str) else saved(root, data), root, split, **own)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@needs_library
def test_the_splits_of_a_dict_and_the_names_of_a_class_label(tmp_path, monkeypatch):
    parts = {"train": rows(), "validation": rows(2, 20, NAMES[::-1]), "test": rows(3, 30)}
    name = saved(tmp_path, DatasetDict(parts))
    train, val, test = (build_dataset(name, tmp_path, split) for split in ("train", "val", "test"))
    assert train.classes == val.classes == test.classes == NAMES
    assert train.targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert val.targets.tolist() == [2, 1]  # by name
    assert (train.targets.dtype, len(test)) == (np.int64, 3)
    assert train.content(4) == png_bytes(4)
    image, target = test[1]
    assert image.tobytes() == Image.open(io.BytesIO(png_bytes(31))).tobytes()
    assert type(target) is int
    assert [part.sample_name(1) for part in (train, val)] == ["train[1]", "validation[1]"]
    root = build_dataset("hf", tmp_path / "pets", "train")
    assert np.array_equal(root.targets, train.targets)
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(build_dataset(name, ".", "train").targets, train.targets)


@needs_library
def test_a_dataset_without_splits_is_for_training(tmp_path):
    name = saved(tmp_path, rows())
    assert build_dataset(name, tmp_path, "train").sample_name(2) == "pets[2]"
    assert (
        "it has no splits, so all rows are training images: set DATA.VAL_FRACTION to 0.2"
        in refusal(tmp_path, name, "val")
    )
    assert len(build_dataset(name, tmp_path, "test", all_rows=True)) == 6


@needs_library
def test_labels_numbers_and_texts(tmp_path):
    columns = {
        "tags": (List(ClassLabel(names=["wet", "day", "new"])), [[0], [], [0, 1]]),
        "words": (List(Value("string")), [["b", "a|c"], [], ["b"]]),
        "age": (Value("float32"), [0.1, -2.0, 3e9]),
        "place": (List(Value("float64")), [[1, 2], [3, 4], [5, 6]]),
        "kind": (Value("string"), ["b", "a", "b"]),
        "grade": (Value("int64"), [10, 9, 9]),
    }
    name = saved(tmp_path, rows(3, **columns))

    def read(target_type="class", **own):
        data = build_dataset(name, tmp_path, "train", target_type=target_type, **own)
        return data.classes, data.targets.tolist()

    assert read("labels") == (["wet", "day", "new"], [[1, 0, 0], [0, 0, 0], [1, 1, 0]])
    assert read("labels", label_column="words") == (["a|c", "b"], [[1, 1], [0, 0], [0, 1]])
    age = np.float32([0.1, -2, 3e9])[:, None].tolist()
    assert read("numbers", label_column="age") == (["age"], age)
    place = (["place_0", "place_1"], [[1, 2], [3, 4], [5, 6]])
    assert read("numbers", label_column="place") == place
    assert read(label_column="kind") == (["a", "b"], [1, 0, 1])
    assert read(label_column="grade") == (["9", "10"], [1, 0, 0])
    assert (
        "several columns of type float or list of float: set DATA.KWARGS.label_column"
        in refusal(tmp_path, name, target_type="numbers")
    )


@needs_library
def test_groups_and_weights(tmp_path):
    columns = {
        "house": (Value("string"), ["a", "b", "a", None]),
        "value": (Value("float32"), [1, 0.5, 0, 2]),
    }
    own = dict(group_column="house", weight_column="value")
    data = build_dataset(saved(tmp_path, rows(4, **columns)), tmp_path, "train", **own)
    one, other, same, none = data.split_groups.tolist()
    assert (one, none) == (same, -1)
    assert other not in (one, none)
    assert data.weights.tolist() == [1, 0.5, 0, 2]
    columns["value"][1][1] = -1
    assert "1 of 4 rows have a weight that is not" in refusal(tmp_path, rows(4, **columns), **own)


@needs_library
def test_the_column_of_images_is_found_by_its_type(tmp_path):
    two = rows(2, mask=(datasets.Image(), [{"bytes": png_bytes(9), "path": None}] * 2))
    message = refusal(tmp_path, two)
    assert "several columns of type Image: set DATA.KWARGS.image_column to one of image, mask" in (
        message
    )
    assert build_dataset("pets/", tmp_path, "train", image_column="mask").content(1) == png_bytes(9)
    with pytest.raises(ValueError, match="column of .*pets 'mosk'; did you mean 'mask'"):
        build_dataset("pets/", tmp_path, "train", image_column="mosk")
    assert "image_column label has type ClassLabel, not Image" in refusal(
        tmp_path, "pets/", image_column="label"
    )
    none = Dataset.from_dict({"label": [1], "pixels": [b"x"]})
    message = refusal(tmp_path, none)
    assert "no column of type Image for DATA.KWARGS.image_column, only label (integer), pix" in (
        message
    )


def store_paths(folder, paths):
    """Rewrite the Arrow file with paths of images; `save_to_disk` stores the bytes where it can."""
    import pyarrow

    (file,) = folder.glob("*.arrow")
    table = pyarrow.ipc.open_stream(file.read_bytes()).read_all()
    number, field = table.schema.get_field_index("image"), table.schema.field("image")
    cells = pyarrow.array([{"bytes": None, "path": path} for path in paths], field.type)
    table = table.set_column(number, field, cells)
    with pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


@needs_library
def test_images_that_are_files(tmp_path):
    name, other = saved(tmp_path, rows(2)), tmp_path / "photos/1.png"
    other.parent.mkdir()
    for path in (tmp_path / "pets/0.png", other):
        path.write_bytes(png_bytes(int(path.stem)))
    store_paths(tmp_path / "pets", ["0.png", str(other)])
    assert "1.png, which is not below" in refusal(tmp_path, name)
    data = build_dataset(name, tmp_path, "train", extra_roots=[str(other.parent)])
    assert [data.content(index) for index in range(2)] == [png_bytes(0), png_bytes(1)]
    store_paths(tmp_path / "pets", ["0.png", "7.png"])
    message = refusal(tmp_path, name)
    assert "1 of 2 rows name an image that does not exist below" in message
    assert "row pets[1]: '7.png'" in message
    store_paths(tmp_path / "pets", ["0.png", "0.png"])
    data = build_dataset(name, tmp_path, "train")
    (tmp_path / "pets/0.png").unlink()
    with pytest.raises(OSError, match="No such file"):
        data.image(1)


@needs_library
def test_bad_labels_are_counted(tmp_path):
    """tests/data/test_table.py has the other sentences about labels."""
    data = rows(4).to_dict() | {"label": [0, -1, None, 2]}
    message = refusal(tmp_path, Dataset.from_dict(data, features=rows(1).features))
    assert "2 of 4 rows have no label; the first in row pets[1]" in message
    tags = {"tags": (List(ClassLabel(names=["wet", "day"])), [[0], [1, -1], None, []])}
    message = refusal(tmp_path, rows(4, **tags), target_type="labels")
    assert "2 of 4 rows have a missing label" in message
    assert "row pets[1]: 'day,'" in message
    parts = DatasetDict(train=rows(3), validation=rows(3, names=["ant", "cat", "emu"]))
    message = refusal(tmp_path, saved(tmp_path, parts, "split"), "val")
    assert "row validation[2]: 'emu'" in message
    ragged = {"box": (List(Value("float32")), [[1, 2], [1], [3, 4]])}
    message = refusal(tmp_path, rows(3, **ragged), target_type="numbers")
    assert "1 of 3 rows have no numbers, or not as many as the first (2)" in message


@needs_library
def test_bad_folders_are_refused_in_one_line(tmp_path):
    (tmp_path / "plain/cat").mkdir(parents=True)
    assert "was not written by Dataset.save_to_disk" in refusal(tmp_path, "plain/")
    assert "which is not below" in refusal(tmp_path / "plain", "../pets/")
    name = saved(tmp_path, DatasetDict(train=rows(), extra=rows()))
    assert "no split validation or val, only train, extra: set DATA.VAL_FRACTION" in refusal(
        tmp_path, name, "val"
    )
    assert "empty cannot be read" in refusal(tmp_path, saved(tmp_path, rows(0), "empty"))
    no_image = rows(2).to_dict() | {"image": [None, {"bytes": png_bytes(0), "path": None}]}
    no_image = Dataset.from_dict(no_image, features=rows(1).features)
    assert "1 of 2 rows have no image; the first in row none[0]" in refusal(
        tmp_path, saved(tmp_path, no_image, "none")
    )
    (arrow,) = (tmp_path / "pets/train").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:200])
    assert "pets cannot be read" in refusal(tmp_path, name)
    state = tmp_path / "pets/train/state.json"
    text = json.loads(state.read_text())
    shutil.copy(next((tmp_path / "pets/extra").glob("*.arrow")), tmp_path / "else.arrow")
    text["_data_files"] = [{"filename": "../../else.arrow"}]
    state.write_text(json.dumps(text))
    assert "else.arrow, which is not below" in refusal(tmp_path, name)
    state.write_text("{")
    assert "pets cannot be read" in refusal(tmp_path, name)


@needs_library
@pytest.mark.trust(6)
def test_only_files_of_the_folder_are_opened(tmp_path):
    """Each one a regular file, and once; the library would open any path and wait for a pipe."""
    name = saved(tmp_path, DatasetDict(train=rows()))
    state, splits = tmp_path / "pets/train/state.json", tmp_path / "pets/dataset_dict.json"
    text = json.loads(state.read_text())
    (file,) = text["_data_files"]
    os.mkfifo(tmp_path / "pets/train/pipe")
    (tmp_path / "pets/train/link").symlink_to("/etc/passwd")
    for given, message in {
        "/etc/passwd": "passwd, which is not below",
        "../../../etc/passwd": "passwd, which is not below",
        "link": "passwd, which is not below",
        "pipe": "not a regular file",
        "none.arrow": "No such file",
    }.items():
        state.write_text(json.dumps(text | {"_data_files": [{"filename": given}]}))
        assert message in refusal(tmp_path, name), given
    state.write_text(json.dumps(text | {"_data_files": [file, file]}))
    assert "more than once" in refusal(tmp_path, name)
    state.write_text(json.dumps(text))
    saved(tmp_path, rows(), "else")
    splits.write_text(json.dumps({"splits": ["train", "../else"]}))
    assert "else, which is not below" in refusal(tmp_path, name)
    splits.unlink()
    splits.symlink_to("/etc/passwd")
    assert "passwd, which is not below" in refusal(tmp_path, name)


@needs_library
@pytest.mark.trust(11)
@pytest.mark.parametrize("column", ["image", "label", "word", "list"])
@pytest.mark.parametrize("value", [2**30, -5])
def test_values_outside_of_an_arrow_file_are_refused(tmp_path, column, value):
    """pyarrow would read beyond the end of its buffers."""
    columns = {"word": (Value("string"), list("abcdef")), "list": (List(Value("int32")), [[1]] * 6)}
    name = saved(tmp_path, rows(**columns))
    (file,) = (tmp_path / "pets").glob("*.arrow")
    table = pyarrow.ipc.open_stream(file.read_bytes()).read_all()
    cells = table.column(column).chunk(0)
    cells = cells.field("bytes") if column == "image" else cells
    content = bytearray(file.read_bytes())
    if column == "label":  # a null bitmap cannot be wrong: declare more rows than there are
        old, new = (n.to_bytes(8, "little", signed=True) for n in (6, value))
        file.write_bytes(bytes(content).replace(old, new))
    else:
        offsets = cells.buffers()[1].to_pybytes()[: 4 * 7]
        at = bytes(content).index(offsets)
        content[at + 12 : at + 16] = value.to_bytes(4, "little", signed=True)
        file.write_bytes(content)
    assert "pets cannot be read" in refusal(tmp_path, name, label_column="label")


@needs_library
@pytest.mark.trust(7)
@pytest.mark.parametrize("column", ["number", "dictionary"])
def test_compressed_values_are_refused(tmp_path, column):
    """A few bytes of them may become gigabytes."""
    name = saved(tmp_path, rows())
    values = pyarrow.array(["a" * 10**6] * 9)
    values = values.dictionary_encode() if column == "dictionary" else pyarrow.array(range(9999))
    table = pyarrow.table({"x": values})
    (file,) = (tmp_path / "pets").glob("*.arrow")
    for compression in (None, "lz4", "zstd"):
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with pyarrow.ipc.new_stream(file, table.schema, options=options) as stream:
            stream.write_table(table)
        assert ("is compressed" in refusal(tmp_path, name)) == (compression is not None)


@needs_library
@pytest.mark.trust(7)
def test_a_table_of_more_rows_than_bytes_is_refused(tmp_path):
    name = saved(tmp_path, rows())
    (file,) = (tmp_path / "pets").glob("*.arrow")
    nulls = pyarrow.table({"label": pyarrow.nulls(10**9)})
    with pyarrow.ipc.new_stream(str(file), nulls.schema) as writer:
        writer.write_table(nulls)
    assert "bytes, but more than" in refusal(tmp_path, name)
