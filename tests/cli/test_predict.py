"""`vil predict` gives the predictions of evaluation for every image, in three formats."""

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.common.small_runs import (
    TINY,
    checkpoint,
    draw_pictures,
    results,
    vil,
)
from vil.data import build_dataset
from vil.data.datasets.digits import read_demo_digits
from vil.pretrained.catalog import DIGITS

DATA = 3


@pytest.fixture
def photos():
    return draw_pictures("photos", {"b": 2, "a": 1})


@pytest.fixture
def stdin(monkeypatch):
    """Standard input that holds these bytes."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def predicted(trained, *words, images):
    """What the command prints as JSON."""
    ended = vil("predict", "--run", trained, "--format", "json", *words, "--images", *images)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def files(found):
    return [record["file"] for record in found]


def shares(record):
    """{class number: probability}, in the order printed."""
    return {row["index"]: row["probability"] for row in record["classes"]}


# What is said


def test_the_accuracy_of_the_predictions_is_that_of_evaluation(trained):
    """The same transform, weights and order of classes: over the test set, saved as files."""
    dataset = build_dataset("fake", None, "val", n=64, size=32, num_classes=4)
    Path("saved").mkdir()
    for index in range(64):
        dataset.image(index).save(f"saved/{index:02}.png")
    found = predicted(trained, "--top", "1", images=["saved"])
    right = [record["classes"][0]["index"] for record in found] == dataset.targets
    assert vil("evaluate", "--run", trained, "--output_dir", "out").code == 0
    assert 100 * np.mean(right) == results("out")["fake"]["top1"]


def test_formats_agree(trained, photos):
    Path("broken.png").write_bytes(b"not a picture")
    words = ["--run", trained, "--top", "2", "--images", photos, "broken.png"]
    shown = {name: vil("predict", "--format", name, *words) for name in ("table", "json", "csv")}
    assert {ended.code for ended in shown.values()} == {0}
    *whole, broken = json.loads(shown["json"].out)
    assert [len(record["classes"]) for record in whole] == [2, 2, 2]
    rows = [
        (record["file"], rank, row["class"], row["index"], row["probability"])
        for record in whole
        for rank, row in enumerate(record["classes"], start=1)
    ]
    *lines, last = csv.DictReader(io.StringIO(shown["csv"].out))
    columns = ("file", "rank", "class", "index", "probability", "error")
    assert [tuple(line.values()) for line in lines] == [(*map(str, row), "") for row in rows]
    assert tuple(last) == columns
    assert list(last.values()) == ["broken.png", "", "", "", "", broken["error"]]
    header, *table = [re.split("  +", line) for line in shown["table"].out.splitlines()]
    assert header == ["file", "class", "probability"]
    assert table[:-1] == [[file, name, f"{share:.4f}"] for file, _, name, _, share in rows]
    assert table[-1] == ["broken.png", "-", f"cannot be read: {broken['error']}"]
    assert vil("predict", *words).out == shown["table"].out


def test_classes_are_written_on_copies(trained, photos):
    Image.new("RGB", (600, 500), (128, 128, 128)).save("large.png")
    before = Path("large.png").read_bytes()
    images = [photos, "large.png"]
    predicted(trained, "--output", "drawn", "--top", "2", images=images)
    assert len(list(Path("drawn").iterdir())) == 4
    drawn = np.asarray(Image.open("drawn/large.png")) != 128
    rows, columns = drawn.any(axis=(1, 2)).nonzero()[0], drawn.any(axis=(0, 2)).nonzero()[0]
    assert rows[0] == columns[0] == 0
    assert 20 <= rows[-1] < 40  # two lines of text
    assert columns[-1] < 200
    assert Path("large.png").read_bytes() == before


def test_batches_and_workers_change_nothing(trained, photos):
    """With a full batch of broken images in the middle."""
    for name in ("b/00.png", "b/01.png"):
        Path(photos, name).write_bytes(b"")
    first, *others = (
        predicted(trained, *words, images=[photos])
        for words in ([], ["DATALOADER.BSZ=2"], ["DATALOADER.BSZ=2", "DATALOADER.WORKERS=1"])
    )
    assert [bool(record.get("error")) for record in first] == [False, False, True, True, False]
    for found in others:
        assert files(found) == files(first)
        for record, same in zip(first, found):
            assert record.get("error") == same.get("error")
            assert shares(record) == pytest.approx(shares(same), abs=1e-6)


# Where pictures come from


def test_a_folder_means_all_images_below_it_in_order(trained, photos):
    picture = (photos / "a/0.png").read_bytes()
    for name in ("z.PNG", ".hidden.png", "a/notes.txt", "c/d/1.jpg", "c/d/3.bmp", "c/d/2.tif"):
        Path(photos, name).parent.mkdir(parents=True, exist_ok=True)
        Path(photos, name).write_bytes(picture)
    Path("odd.name").write_bytes(picture)
    found = predicted(trained, images=["odd.name", photos, "photos/b/1.png"])
    below = ["a/0.png", "b/0.png", "b/1.png", "c/d/1.jpg", "c/d/2.tif", "c/d/3.bmp", "z.PNG"]
    assert files(found) == ["odd.name", *(f"photos/{name}" for name in below), "photos/b/1.png"]


@pytest.mark.parametrize("kind", ["png", "ppm"])
def test_standard_input_is_an_image(trained, stdin, kind):
    """A PNG is no UTF-8; a dark PPM is, but holds NUL."""
    Image.new("RGB", (40, 36), (0, 10, 5)).save(f"dark.{kind}")
    stdin(Path(f"dark.{kind}").read_bytes())
    found = predicted(trained, images=["-", f"dark.{kind}"])
    assert files(found) == ["-", f"dark.{kind}"]
    assert found[0]["classes"]
    assert found[0]["classes"] == found[1]["classes"]


def test_standard_input_is_a_list(trained, photos, stdin):
    Path("späte birne.png").write_bytes((photos / "a/0.png").read_bytes())
    stdin("photos/b\r\n\r\nspäte birne.png\nphotos/a/0.png".encode())
    found = predicted(trained, images=["-"])
    names = ["photos/b/0.png", "photos/b/1.png", "späte birne.png", "photos/a/0.png"]
    assert files(found) == names


# Names of classes


def test_classes_have_the_names_given_or_their_numbers(trained, photos):
    text = "null\nneunzig\n180\n \n"
    Path("names.txt").write_text(text, encoding="utf-8-sig")  # as Windows' editors save it
    words = ["--top", "all", "--classes", "names.txt"]
    for row in predicted(trained, *words, images=["photos/a/0.png"])[0]["classes"]:
        assert row["class"] == ["null", "neunzig", "180", " "][row["index"]]
    shutil.copy(checkpoint(trained) / "model.safetensors", "weights.safetensors")
    weights = ("MODEL.MODEL_PATH", "weights.safetensors")
    ended = vil("predict", *TINY, *weights, "--format=json", "--images", photos)
    for row in json.loads(ended.out)[0]["classes"]:
        assert row["class"] == str(row["index"])


# What is wrong


def test_unreadable_images_are_reported_and_the_others_predicted(trained, photos, caplog):
    Path("broken.png").write_bytes((photos / "a/0.png").read_bytes()[:60])
    found = predicted(trained, images=["broken.png", "nowhere.png", "photos/b/0.png"])
    assert [bool(record.get("error")) for record in found] == [True, True, False]
    assert [len(record["classes"]) for record in found] == [0, 0, 4]
    assert "No such file" in found[1]["error"]
    for name in ("broken.png", "nowhere.png"):
        assert sum(name in record.getMessage() for record in caplog.records) == 1


def test_nothing_could_be_read(trained, stdin):
    stdin(b"\xff\xd8 a jpeg that ends early")
    ended = vil("predict", "--run", trained, "--format", "json", "--images", "-", "nowhere.png")
    assert ended.code == DATA
    assert ended.err.endswith("vil predict: none of the 2 images could be read\n")
    assert files(json.loads(ended.out)) == ["-", "nowhere.png"]
    ended = vil("predict", "--run", trained, "nope", "nowhere.png")
    assert ended == (DATA, "", "vil predict: there is no file or folder nope, nowhere.png\n")


def test_the_shipped_weights_know_the_shipped_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = vil("predict", "--sample", "--format", "csv", "--top", "1")
    assert ended.code == 0, ended.err
    rows = list(csv.DictReader(io.StringIO(ended.out)))
    right = [row["class"] == row["file"].split("/")[0] for row in rows]
    assert len(right) == 360
    assert np.mean(right) >= 0.97
    said = DIGITS.meta["metrics"]["digits"]["acc@1"]
    assert 100 * np.mean(right) == pytest.approx(said, abs=1)  # an image or two hang on rounding
    assert f"{sum(right)} of 360 correct" in ended.err

    pictures, classes = read_demo_digits()
    Path("photo.png").write_bytes(pictures[123].content)
    one = vil("predict", "photo.png", "--top", "1", "--format", "json")
    assert json.loads(one.out)[0]["classes"][0]["class"] == rows[123]["class"]
    assert classes[123] == rows[123]["file"].split("/")[0]
    assert "the shipped vil_nano" in one.err
    with_settings = vil("predict", "DEVICE", "cpu", "photo.png", "--top", "1", "--format", "json")
    assert json.loads(with_settings.out) == json.loads(one.out)


def test_a_folder_of_a_model_says_what_it_is(tmp_path, monkeypatch):
    """One of timm's, whose image size is a pair."""
    import timm

    from vil.integrations import timm_register  # noqa: F401 - registers them
    from vil.pretrained.hub import save_pretrained

    monkeypatch.chdir(tmp_path)
    Path("photo.png").write_bytes(read_demo_digits()[0][0].content)
    model = timm.create_model("vil_nano.digits", pretrained=True)
    save_pretrained(model, "digits")
    words = ("photo.png", "--top", "1", "--format", "json")
    wanted = json.loads(vil("predict", *words).out)[0]["classes"][0]["class"]
    shown = vil("predict", "MODEL.MODEL_PATH=digits", *words)
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)[0]["classes"][0]["class"] == wanted
    about = dict(mean=[0.3] * 3, std=[0.3] * 3, crop_pct=1.0, interpolation="lanczos")
    save_pretrained(model, "lanczos", transform=about)
    refused = vil("predict", "MODEL.MODEL_PATH=lanczos", *words)
    assert (refused.code, "the interpolation 'lanczos'" in refused.err) == (2, True)
