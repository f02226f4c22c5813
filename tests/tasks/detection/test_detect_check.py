"""vil detect check: what a file holds, what is wrong with it, and whether it can be trained on."""

import json
import re

import pytest
from PIL import Image

from tests.common.detection.coco_files import box, content, runs, without, write
from vil.cli import main


@pytest.fixture
def check(capsys):
    """The exit code, what is shown, and what is said of errors."""

    def run(*words):
        code = main(["detect", "check", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def rows(text):
    """The summary's rows by name."""
    return dict(re.findall(r"^(images|boxes|by area|masks|categories) +(.*)$", text, re.MULTILINE))


def test_a_whole_file(check, tmp_path):
    annotations = [
        box(1, area=32**2 - 1),
        box(2, area=32**2, category=7),
        box(3, image=2, area=96**2, segmentation=runs(33, 21)),
        box(4, image=3, iscrowd=1),
    ]
    folder, file = write(tmp_path, annotations)
    code, shown, said = check(file, "--images", folder)
    assert (code, said) == (0, "")
    assert shown.splitlines()[-1] == "no faults"
    assert rows(shown) == {
        "images": "4, 2 of them without a usable box",
        "boxes": "3 usable, 1 crowd (left out of training)",
        "by area": "small 1, medium 1, large 1",
        "masks": "3 of the usable boxes have one",
        "categories": "2: two (2), seven of nine (1)",
    }


def test_drops_are_no_error_and_are_listed(check, tmp_path):
    bad = [box(n, bbox=(0, 0, 0, 5)) for n in range(100, 120)]
    bad += [box(7, segmentation=[]), box(8, category=99), box(9, image=99)]
    folder, file = write(tmp_path, [box(1), *bad])
    code, shown, said = check(file)
    assert (code, said) == (0, "")
    assert "20 dropped annotations: a box without area\n  annotation 100 a.png: a box" in shown
    assert "and 8 more (--list FILE)" in shown
    assert "1 dropped annotation: no usable segmentation" in shown
    assert rows(shown)["boxes"].startswith("2 usable")
    assert rows(shown)["masks"] == "1 of the usable boxes have one"
    code, shown, _ = check(file, "--list", tmp_path / "faults.tsv")
    assert "--list" not in shown
    lines = (tmp_path / "faults.tsv").read_text().splitlines()
    assert len(lines) == 23
    assert lines[0] == "annotation 100\ta.png\ta box without area"


def test_boxes_alone_are_enough(check, tmp_path):
    _, file = write(tmp_path, [without(box(1), "segmentation")])
    code, shown, _ = check(file)
    assert code == 0
    assert rows(shown)["masks"] == "none: mask_rcnn needs them"
    assert shown.endswith("no faults\n")


def test_wrong_sizes_are_reported(check, tmp_path):
    folder, file = write(tmp_path, [box(1)])
    Image.new("L", (30, 40)).save(folder / "a.png")
    code, shown, _ = check(file, "--images", folder)
    assert code == 0
    assert "1 image: of another size than the file says\n" in shown
    assert "image a.png: 40 x 30 px in the file, but 30 x 40 px in the image" in shown


def test_what_ends_a_training_is_exit_code_3(check, tmp_path):
    folder, file = write(tmp_path, [box(1)])
    (folder / "c.jpg").write_bytes(b"no picture")
    code, shown, said = check(file, "--images", folder)
    assert code == 3
    assert "1 image: cannot be opened\n  image c.jpg: cannot be opened (" in shown
    assert "1 of 4 images cannot be opened" in said
    (folder / "a.png").unlink()
    code, shown, said = check(file, "--images", folder)
    assert code == 3
    assert "image a.png: is not in the folder" in shown
    assert said.endswith("cannot be used for training: 1 image is missing\n")
    for annotations in ([], [box(1, bbox=(0, 0, 0, 0))], [box(1, iscrowd=1)]):
        file.write_text(json.dumps(content(annotations)))
        code, shown, said = check(file)
        assert code == 3
        assert said.endswith("cannot be used for training: it has no usable box\n")
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        (["no.json"], 3, "there is no annotation file no.json"),
        (["list.json"], 3, "list.json has no list 'images'; expected COCO's format"),
        (["file.json", "--images", "nowhere"], 3, "there is no image folder nowhere"),
        (["file.json", "--list", "no/where.tsv"], 2, "--list no/where.tsv: there is no folder no"),
    ],
)
def test_bad_words_are_one_line(check, tmp_path, monkeypatch, words, code, pattern):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, [box(1)])
    (tmp_path / "list.json").write_text("[]")
    found, _, said = check(*words)
    assert (found, said.count("\n")) == (code, 1)
    assert pattern in said
