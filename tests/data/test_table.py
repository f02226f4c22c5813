"""Tables of images: columns, targets, splits, and everything that can be wrong with them."""

import numpy as np
import pytest
from PIL import Image

from tests.common.built import task_of
from vil.config import get_config
from vil.data import build_dataset
from vil.engine.distributed import DistInfo
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke

IMAGES = ("a/1.png", "a/2.png", "b/1.png", "b/ü 2.png")


@pytest.fixture
def root(tmp_path):
    for number, name in enumerate(IMAGES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (5, 4), (number, 0, 0)).save(tmp_path / name)
    return tmp_path


def write(root, text, name="labels.csv", encoding="utf-8"):
    (root / name).write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return name


def open_table(root, text, split="train", *, name="labels.csv", **own):
    return build_dataset(write(root, text, name), root, split, **own)


def table_of(labels, header="path,label"):
    return "\n".join([header, *(f"{i},{label}" for i, label in zip(IMAGES, labels))]) + "\n"


def refusal(root, text, split="train", **own):
    with pytest.raises(DataError) as caught:
        open_table(root, text, split, **own)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_text_labels_are_classes_in_order(root):
    data = open_table(root, table_of(["dog", "cat", "dog", "eel"]))
    assert data.classes == ["cat", "dog", "eel"]
    assert data.targets.tolist() == [1, 0, 1, 2]
    assert data.targets.dtype == np.int64
    assert [data.sample_name(i) for i in range(4)] == list(IMAGES)
    assert data[3][0].getpixel((0, 0)) == (3, 0, 0)
    assert data.content(0) == (root / IMAGES[0]).read_bytes()
    assert data.names.dtype.kind == "S"  # not a list, which every worker would copy


def test_numbers_as_labels_are_sorted_as_numbers(root):
    assert open_table(root, table_of([10, 9, 9, 2])).classes == ["2", "9", "10"]


def test_two_spellings_of_a_number_are_named(root, caplog):
    for _ in range(2):
        assert open_table(root, table_of(["01", 10, 1, 10])).classes == ["01", "1", "10"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "01 and 1 are two classes" in line


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("DATA.TRAIN=table", "DATA.TEST=other.csv"), ""),
        (("DATA.TRAIN=table", "DATA.TEST=labels.csv"), "val"),
        (("DATA.TRAIN=./labels.csv", "DATA.TEST=labels.csv"), "val"),
        (("DATA.TRAIN=other.csv", "DATA.VAL=table", "DATA.TEST=labels.csv"), "test"),
    ],
    ids=str,
)
def test_one_table_without_splits_is_not_two_sets(root, words, refused):
    """Under two names, as training and test images or as validation and test images."""
    for name in ("labels.csv", "other.csv"):
        write(root, table_of(["cat", "dog", "cat", "dog"]), name)
    words = [*words, f"DATA.PATH={root}", "DATA.NUM_CLASSES=2", "DATALOADER.BSZ=2"]
    task = task_of(get_config(None, words))
    task.class_names = task.train_loader(DistInfo()).classes
    if not refused:
        (loader,) = task.test_loaders(DistInfo()).values()
        assert len(loader.dataset) == len(IMAGES)
        return
    with pytest.raises(DataError, match=f"no column 'split', so none of its rows are {refused}"):
        task.test_loaders(DistInfo(), part="test")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_quotes_tabs_and_a_byte_order_mark(root, encoding):
    text = 'label\tpath\r\n"a ""big"" cat"\ta/1.png\r\n\r\n\'dog\'\t"b/1.png"\r\n'
    (root / "x.tsv").write_bytes(text.encode(encoding))
    data = build_dataset("x.tsv", root, "train")
    assert data.classes == ["'dog'", 'a "big" cat']
    assert data.targets.tolist() == [1, 0]


def test_several_labels_per_image(root):
    text = table_of(["cat|dog", "", "dog", " dog | eel "])
    data = open_table(root, text, target_type="labels")
    assert data.classes == ["cat", "dog", "eel"]
    assert data.targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [0, 1, 1]]
    columns = table_of(["1,0", "0,0", "0,1", "1,1"], "path,day,wet")
    own = dict(target_type="labels", label_columns=["wet", "day"])
    data = open_table(root, columns, **own)
    assert data.classes == ["wet", "day"]
    assert data.targets.tolist() == [[0, 1], [0, 0], [1, 0], [1, 1]]
    message = refusal(root, text.replace("eel", "NaN"), target_type="labels")
    assert "1 of 4 rows have a missing label" in message
    assert "line 5: 'dog | NaN'" in message
    message = refusal(root, columns.replace("1,1", "1,2"), **own)
    assert "1 of 4 rows have a value other than 0 or 1 in the column wet" in message
    assert "line 5: '2'" in message


def test_lists_of_0_and_1_are_not_names(root):
    message = refusal(root, table_of(["1|0|0", "", "1|1|0", "0|1|0"]), target_type="labels")
    assert "3 of 4 rows have lists of 0 and 1 instead of label names" in message
    assert "DATA.KWARGS.label_columns; the first in line 2: '1|0|0'" in message
    for labels in (["0|1", "1", "", "0"], [0, 1, 1, 0], ["cat|cat", "dog", "", "cat|dog"]):
        assert len(open_table(root, table_of(labels), target_type="labels").classes) == 2


def test_numbers_per_image(root):
    text = table_of(["0.5,-1", "1,2", "3e2,4", "0,0"], "path,x,y")
    data = open_table(root, text, target_type="numbers", label_columns=["y", "x"])
    assert data.classes == ["y", "x"]
    assert data.targets.tolist() == [[-1, 0.5], [2, 1], [4, 300], [0, 0]]
    assert data.targets.dtype == np.float64
    data = open_table(root, text, target_type="numbers", label_columns="x")
    assert (data.classes, data.targets.tolist()) == (["x"], [[0.5], [1], [300], [0]])
    for word in ("nan", "1_000"):
        own = dict(target_type="numbers", label_column="x")
        message = refusal(root, text.replace("1,2", f"{word},2"), **own)
        assert "1 of 4 rows have no finite number in the column x; the first in line 3" in message


def test_splits_weights_and_groups(root):
    rows = ["cat,train,g,1", "dog,train,h,0.5", "cat,val,i,2", "dog,test,,0"]
    text = table_of(rows, "path,label,split,group,weight")
    train, val, test = (open_table(root, text, s) for s in ("train", "val", "test"))
    assert [len(part) for part in (train, val, test)] == [2, 1, 1]
    assert train.weights.tolist() == [1, 0.5]
    assert len({*train.split_groups.tolist(), -1}) == 3
    assert test.split_groups.tolist() == [-1]
    assert val.classes == ["cat", "dog"]
    torn = text.replace(",i,", ",g,")
    message = refusal(root, torn)
    assert "1 of 4 rows are in another split than the first image of their group" in message
    assert "line 4: 'g'" in message


PLAIN = table_of("aabb")
BAD = {
    "missing images": (PLAIN.replace("a/2", "a/9"), r"1 of 4 rows name an image .* line 3: 'a/9"),
    "listed twice": (PLAIN.replace("a/2", "./a//1"), "listed before; the first in line 3: 'a/1"),
    "no path": (PLAIN.replace("a/2.png", " "), "1 of 4 rows have no path; the first in line 3"),
    "no label": (PLAIN.replace("2.png,a", "2.png, "), "1 of 4 rows have no label"),
    "nan": (PLAIN.replace("2.png,a", "2.png,nan"), "1 of 4 rows have no label"),
    "mixed labels": (table_of([1, 2, "cat", 1]), "1 of 4 rows have text labels, .* integer labels"),
    "fractions": (table_of([1.5, 2.5, 0.5, 1.5]), "4 of 4 rows have labels that are numbers with"),
    "unknown split": (
        table_of(["a,train", "a,vall", "b,train", "b,val"], "path,label,split"),
        "1 of 4 rows have a split other than train, val, test; the first in line 3: 'vall'",
    ),
    "class of val": (
        table_of(["a,train", "a,train", "b,val", "c,val"], "path,label,split"),
        "2 of 4 rows have a class that no training image has; the first in line 4: 'b'",
    ),
    "no train": (table_of(["a,val"] * 4, "path,label,split"), "no rows of the split train"),
    "weight": (table_of(["a,1", "a,-1", "a,nan", "a,x"], "path,label,weight"), "3 of 4 rows"),
    "line break": (PLAIN.replace("2.png,a", '2.png,"a\nb"'), "1 of 4 rows .* line 4: 'a.nb'"),
    "ragged": (
        "path,label\na/1.png,a\na/2.png\n",
        "line 3: the line has 1 cells, but there are 2 columns",
    ),
    "empty": ("", "is empty"),
    "header only": ("path,label\n", "is empty: it has no rows"),
    "repeated column": ("path,label,label\n", "several columns with the name label"),
    "not UTF-8": (b"path,label\na/1.png,\xff\n", "line 2: not UTF-8"),
    "open quote": ('path,label\na/1.png,"a\n', "line 2: unexpected end of data"),
    "huge line": (b"path,label\n" + b"x" * (2 << 20), "the line is longer than 1048576 bytes"),
    "huge cell": (b"path,label\n" + b"x" * 200_000, "line 2: field larger than field limit"),
    "outside": (PLAIN.replace("a/2.png", "../x.png"), "which is not below"),
    "nul": (PLAIN.replace("a/2", "a\0"), "line"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_are_refused_with_a_line(root, name):
    text, pattern = BAD[name]
    (root.parent / "x.png").write_bytes(b"")
    with pytest.raises(DataError, match=pattern):
        open_table(root, text)


@pytest.mark.trust(7)
@pytest.mark.parametrize("repeated", ["path", "labels"])
def test_parquet_that_repeats_a_long_text_is_refused(root, repeated):
    """Its 3 GB would take some hundred bytes."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = pyarrow.DictionaryArray.from_arrays([0] * 3000, ["z" * 10**6])
    if repeated == "labels":
        text = pyarrow.ListArray.from_arrays(list(range(3001)), text)
    columns = {"path": ["a.png"] * 3000, "label": ["a"] * 3000, repeated: text}
    parquet.write_table(pyarrow.table(columns), root / "x.parquet", compression="zstd")
    with pytest.raises(DataError, match="repeats long texts"):
        build_dataset("x.parquet", root, "train")


def test_parquet_has_the_same_samples(root):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {
        "path": list(IMAGES),
        "label": [["cat", "dog"], [], ["a|b"], ["dog"]],
        "x": [1, 2, 3, 4],
        "box": [[1, 2], [3, 4], [5, 6], [7, 8]],
    }
    parquet.write_table(pyarrow.table(columns), root / "x.parquet")
    data = build_dataset("x.parquet", root, "train", target_type="labels")
    assert data.classes == ["a|b", "cat", "dog"]
    assert data.targets.tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 1]]
    numbers = build_dataset("x.parquet", root, "train", target_type="numbers", label_column="x")
    assert numbers.targets[:, 0].tolist() == [1, 2, 3, 4]
    boxes = build_dataset("x.parquet", root, "train", target_type="numbers", label_column="box")
    assert boxes.classes == ["box_0", "box_1"]
    assert boxes.targets.tolist() == columns["box"]
    for own in ({"path_column": "box"}, {"target_type": "labels", "label_columns": ["x", "box"]}):
        with pytest.raises(DataError, match="4 of 4 rows have a list in the column box"):
            build_dataset("x.parquet", root, "train", **own)
    with pytest.raises(DataError, match=r"1 of 4 rows have several labels \(set TASK to multilab"):
        build_dataset("x.parquet", root, "train")
    columns["label"] = [[True, False], [False, False], [], [True, True]]
    parquet.write_table(pyarrow.table(columns), root / "x.parquet")
    with pytest.raises(DataError, match="3 of 4 rows have lists of 0 and 1"):
        build_dataset("x.parquet", root, "train", target_type="labels")
    (root / "x.parquet").write_bytes((root / "x.parquet").read_bytes()[:50])
    with pytest.raises(DataError, match="cannot be read"):
        build_dataset("x.parquet", root, "train")


@pytest.mark.parametrize("missing", [None, ["cat", None], ["NaN"], [""]])
def test_missing_labels_in_parquet_are_refused(root, missing):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"path": list(IMAGES), "label": [["cat"], missing, [], ["dog"]]}
    parquet.write_table(pyarrow.table(columns), root / "x.parquet")
    with pytest.raises(DataError, match="1 of 4 rows have a missing label .* in row 2"):
        build_dataset("x.parquet", root, "train", target_type="labels")
