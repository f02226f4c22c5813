"""TSV datasets: the files of a yaml, row offsets, labels, and invalid files."""

import os

import numpy as np
import pytest
from PIL import Image

from tests.common.data_files import samples, write_tsv
from vil.data import build_dataset
from vil.data.formats.tsv_file import TsvFile
from vil.data.image import UnreadableImage
from vil.utils.errors import DataError

pytestmark = pytest.mark.smoke

FILES = samples("train")
KEYS = list(FILES)


@pytest.fixture
def root(tmp_path):
    write_tsv(tmp_path, "train", FILES)
    return tmp_path


def describe(root, text, **files):
    """Write train.yaml and further files."""
    for name, content in files.items():
        (root / name).write_text(content)
    (root / "train.yaml").write_text(text)


def names(dataset):
    return [dataset.sample_name(i) for i in range(len(dataset))]


def test_rows_are_samples_in_order(root):
    dataset = build_dataset("tsv", root, "train")
    assert names(dataset) == KEYS
    assert dataset.targets.tolist() == list(range(10))
    assert dataset.classes == [str(i) for i in range(10)]
    (root / "one.png").write_bytes(FILES[KEYS[4]])
    with Image.open(root / "one.png") as image:
        assert dataset[4][0].tobytes() == image.tobytes()


def test_a_missing_lineidx_is_written_with_a_warning(root, caplog):
    written = (root / "train.lineidx").read_text()
    (root / "train.lineidx").unlink()
    assert names(build_dataset("tsv", root, "train")) == KEYS
    assert "train.lineidx was missing, and was written with 10 rows" in caplog.text
    assert (root / "train.lineidx").read_text() == written
    assert not [name for name in os.listdir(root) if name.startswith(".")]
    caplog.clear()
    build_dataset("tsv", root, "train")
    assert not caplog.text


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_are_found_for_all_line_ends(rows, end, tmp_path):
    path = tmp_path / "a.tsv"
    line = "\r\n" if end == "\r\n" else "\n"
    path.write_bytes((line.join(f"k{i}\t{i}" for i in range(rows)) + end).encode())
    file = TsvFile(path)
    assert [file.key(i) for i in range(len(file))] == [f"k{i}" for i in range(rows)]
    assert list(file.labels(range(rows), before_image=False)) == [str(i) for i in range(rows)]
    assert len(TsvFile(path)) == rows  # now from the lineidx


def test_rows_are_found_across_blocks(tmp_path, monkeypatch):
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"{'k' * i}\t{i}\n" for i in range(40)))
    monkeypatch.setattr("vil.data.formats.tsv_file.SCAN_BYTES", 7)
    monkeypatch.setattr("vil.data.formats.tsv_file.KEY_BYTES", 2)
    for _ in range(2):  # written, then read
        assert [TsvFile(path).row(i) for i in (0, 9, 39)] == [
            f"{'k' * i}\t{i}".encode() for i in (0, 9, 39)
        ]
    assert [len(TsvFile(path).key(i)) for i in range(40)] == list(range(40))


@pytest.mark.parametrize(
    ("lineidx", "message"),
    [
        ("", "do not increase from 0"),
        ("0\n5\n5\n", "do not increase from 0"),
        ("3\n8\n", "do not increase from 0"),
        ("0\n999999\n", "last row starts at 999999"),
        ("0\n7\n", "its last row, at byte 7, is not the last line"),
        ("0\n", "its last row, at byte 0, is not the last line"),
        ("0\nseven\n", "must have one integer per line"),
    ],
)
def test_a_wrong_lineidx_is_rejected(root, lineidx, message):
    (root / "train.lineidx").write_text(lineidx)
    with pytest.raises(DataError, match=message):
        build_dataset("tsv", root, "train")


def test_a_truncated_tsv_is_rejected(root):
    with open(root / "train.tsv", "r+b") as file:
        file.truncate((root / "train.tsv").stat().st_size // 2)
    with pytest.raises(DataError, match=r"(?s)is not the index of.*delete the index to rebuild it"):
        build_dataset("tsv", root, "train")


def test_labels_may_be_in_a_separate_file(root):
    """The image rows then have no label, and hw has the keys."""
    (root / "train.lineidx").unlink()
    rows = [line.split("\t") for line in (root / "train.tsv").read_text().splitlines()]
    (root / "train.tsv").write_text("".join(f"{key}\t{image}\n" for key, _, image in rows))
    with pytest.raises(DataError, match=r"train\.tsv, line 1: no label; .*key, label and image"):
        build_dataset("tsv", root, "train")
    describe(
        root,
        f"img: train.tsv\nlabel: {root}/l.tsv\nhw: hw.tsv\n",
        **{
            "l.tsv": "".join(f"x{i}\t{9 - i}\n" for i in range(10)),
            "hw.tsv": "".join(f"h{i}\t[]\n" for i in range(10)),
        },
    )
    dataset = build_dataset("tsv", root, "train")
    assert dataset.targets.tolist() == list(range(9, -1, -1))
    assert names(dataset) == [f"h{i}" for i in range(10)]
    assert dataset[0][0].size == (12, 9)
    (root / "train.yaml").write_text("img: train.tsv\nlabel: l.tsv\n")
    assert names(build_dataset("tsv", root, "train"))[3] == "x3"
    (root / "l.tsv").write_text("x\t0\n")
    (root / "l.lineidx").unlink()
    with pytest.raises(DataError, match=r"l\.tsv has 1 rows, but .*train\.tsv has 10"):
        build_dataset("tsv", root, "train")


def test_a_linelist_selects_and_repeats_rows(root, caplog):
    describe(root, "img: train.tsv\nlinelist: some\ncaption: c.tsv\n", some="7\n2\n7\n")
    dataset = build_dataset("tsv", root, "train")
    assert "unknown keys, which are ignored: caption" in caplog.text
    assert names(dataset) == [KEYS[7], KEYS[2], KEYS[7]]
    assert dataset.targets.tolist() == [7, 2, 7]
    assert dataset[0][0].tobytes() == dataset[2][0].tobytes() != dataset[1][0].tobytes()
    (root / "some").write_text("1\n10\n")
    with pytest.raises(DataError, match=r"some, line 2: row 10 is outside 0\.\.9"):
        build_dataset("tsv", root, "train")


def test_a_labelmap_names_the_classes(root):
    """Names take precedence over numbers. The default number is that of the line."""
    rows = (root / "train.tsv").read_text().replace("\t3\t", "\tgrey whale\t")
    (root / "train.tsv").write_text(rows)
    (root / "train.lineidx").unlink()
    lines = "".join(f"name {i}\n" for i in range(9)) + "grey whale\n"
    describe(root, "img: train.tsv\nlabelmap: m\n", m=lines)
    dataset = build_dataset("tsv", root, "train")
    assert dataset.classes == [f"name {i}" for i in range(9)] + ["grey whale"]
    assert dataset.targets.tolist() == [0, 1, 2, 9, 4, 5, 6, 7, 8, 9]
    (root / "m").write_text("grey whale\t11\nother\t2\r\n")
    dataset = build_dataset("tsv", root, "train")
    assert dataset.targets[3] == 11
    assert (len(dataset.classes), dataset.classes[2], dataset.classes[3]) == (12, "other", "3")
    with pytest.raises(ValueError, match="num_classes is 9, but the labelmap has 12"):
        build_dataset("tsv", root, "train", num_classes=9)
    (root / "m").write_text("blue whale\nx\t9\n")
    with pytest.raises(DataError, match="line 4: .* a name of the labelmap or .* 'grey whale'"):
        build_dataset("tsv", root, "train")
    for invalid in ("a\na\n", "a\t0\nb\t0\n", "a\n\nb\n"):
        (root / "m").write_text(invalid)
        with pytest.raises(
            DataError, match="m, line 2: the name is empty, or the name or the number was used"
        ):
            build_dataset("tsv", root, "train")


@pytest.mark.parametrize("label", ["cat", "", "1.5", "-1", "10", '[{"class": "1"}]'])
def test_a_wrong_label_is_named(root, label):
    (root / "train.tsv").write_text(
        (root / "train.tsv").read_text().replace("\t4\t", f"\t{label}\t")
    )
    (root / "train.lineidx").unlink()
    with pytest.raises(DataError, match=r"train\.tsv, line 5: .*class"):
        build_dataset("tsv", root, "train", num_classes=10)


def test_validation_has_the_classes_of_training(root):
    write_tsv(root, "val", {"c2/1.png": FILES[KEYS[2]]})
    write_tsv(root, "val", {"c2/1.png": FILES[KEYS[2]]}, name="other")
    assert len(build_dataset("tsv", root, "val").classes) == 10
    for split in ("train", "val"):  # any yaml below the root is a dataset of both splits
        other = build_dataset("other.yaml", root, split)
        assert (names(other), len(other.classes), other.split) == (["c2/1.png"], 3, split)
    write_tsv(root, "val", {"c10/1.png": FILES[KEYS[2]]})
    with pytest.raises(DataError, match=r"val\.tsv, line 1: class 10 is out of range.*0\.\.9"):
        build_dataset("tsv", root, "val")


def test_labels_of_imagenet_22k_are_json(root):
    write_tsv(root, "train", FILES, as_json=True, name="imagenet_22k_a")
    dataset = build_dataset("imagenet_22k_a.yaml", root, "train")
    assert dataset.targets.tolist() == list(range(10))
    yaml = root / "imagenet_22k_a.yaml"
    (root / "m").write_text("".join(f"{9 - i}\n" for i in range(10)))
    yaml.write_text("img: imagenet_22k_a.tsv\nlabelmap: m\n")
    dataset = build_dataset("imagenet_22k_a.yaml", root, "train")
    assert dataset.targets.tolist() == list(range(9, -1, -1))
    yaml.write_text("img: imagenet_22k_a.tsv\nlabel: train.tsv\n")
    with pytest.raises(DataError, match="remove the key 'label'"):
        build_dataset("imagenet_22k_a.yaml", root, "train")
    yaml.write_text("img: train.tsv\n")
    with pytest.raises(DataError, match="line 1: the label must be a JSON list"):
        build_dataset("imagenet_22k_a.yaml", root, "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label: train.tsv\n", "must have the key 'img'"),
        ("img:\n", "must have the key 'img'"),
        ("- img\n", "must have the key 'img'"),
        ("img: [1]\n", "img must be the path of a file"),
        ("a: &a [x, x]\nimg: *a\n", "img must be the path of a file"),
        ("img: no.tsv\n", r"train\.yaml names a file that does not exist: .*no\.tsv"),
        ("img: !!python/object/apply:os.system [touch canary]\n", "cannot be read: could not"),
        ("img: {\n", "cannot be read"),
        (f"img: {'[' * 9000}\n", "cannot be read"),
        ("img: letter.txt\n", "letter.txt, line 1: no label"),
    ],
)
def test_an_invalid_yaml_is_one_line(root, text, message, monkeypatch):
    monkeypatch.chdir(root)
    (root / "train.yaml").write_text(text)
    (root / "letter.txt").write_text("Dear friend,\n")
    with pytest.raises(DataError, match=message) as caught:
        build_dataset("tsv", root, "train")
    assert "\n" not in str(caught.value)
    assert not (root / "canary").exists()
    assert not (root / "letter.lineidx").exists()
    (root / "train.yaml").unlink()
    with pytest.raises(DataError, match=r"there is no .*train\.yaml"):
        build_dataset("tsv", root, "train")


def test_broken_base64_and_deleted_files_are_unreadable(root):
    dataset = build_dataset("tsv", root, "train")
    assert np.asarray(dataset[0][0]).shape == (9, 12, 3)
    data = (root / "train.tsv").read_bytes()
    (root / "train.tsv").write_bytes(data.replace(b"iVBOR", b"iV!OR"))
    with pytest.raises(UnreadableImage, match="not base64"):
        dataset[0]
    reopened = build_dataset("tsv", root, "train")
    (root / "train.tsv").unlink()
    with pytest.raises(OSError, match=r"train\.tsv"):
        reopened[1]
    assert reopened.sample_name(1) == f"{root}/train.tsv, line 2"
