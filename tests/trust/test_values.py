"""Images of more than 8 bits are converted by a stated rule, and turned upright."""

import os

import numpy as np
import pytest
from PIL import Image

from tests.common.small_runs import SMALL, results, succeeds, vil
from vil.data.datasets.folder import Folder
from vil.data.image import UnreadableImage, read_image, read_size
from vil.utils import rgb

pytestmark = pytest.mark.trust(4)

RAMP = np.linspace(0, 1, 64).reshape(8, 8)


@pytest.fixture(autouse=True)
def warn_again():
    rgb._warn.cache_clear()


def save(array, file, **options):
    Image.fromarray(array).save(file, **options)
    return file


def gray(file, **options):
    return np.asarray(read_image(file, **options))[..., 0].astype(int)


KINDS = {
    "8 bits": ("a.png", (RAMP * 255).round().astype(np.uint8), (), 1),
    "16 bits": ("a.png", (RAMP * 65535).astype(np.uint16), (), 1),
    "16-bit TIFF": ("a.tif", (RAMP * 65535).astype(np.uint16), (), 1),
    "12 in 16 bits": ("a.tif", (RAMP * 4095).astype(np.uint16), (0, 4095), 1),
    "float 0 to 1": ("a.tif", RAMP.astype(np.float32), (), 1),
    "float 0 to 255": ("a.tif", (RAMP * 255).astype(np.float32), (0, 255), 1),
    "float around 0": ("a.tif", (RAMP * 2 - 1).astype(np.float32), (-1, 1), 1),
    "32-bit integers": ("a.tif", (RAMP * 1e6).astype(np.int32), (0, 1e6), 1),
}


@pytest.mark.parametrize(("name", "pixels", "value_range", "error"), KINDS.values(), ids=KINDS)
def test_the_same_ramp_in_every_type(tmp_path, name, pixels, value_range, error):
    found = gray(save(pixels, tmp_path / name), value_range=value_range)
    assert np.abs(found - RAMP * 255).max() <= error


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (
            (RAMP * 255).astype(np.float32),
            "values from 0 to 255 are outside of 0 to 1: set",
        ),
        ((RAMP * 9).astype(np.int32), r"32-bit integers have no .* set DATA.VALUE_RANGE to \[low"),
        (np.full((8, 8), np.nan, np.float32), "no pixel has a finite value"),
    ],
)
def test_values_without_a_rule_are_refused(tmp_path, pixels, message):
    with pytest.raises(UnreadableImage, match=message):
        read_image(save(pixels, tmp_path / "a.tif"))


def test_some_nan_become_black(tmp_path):
    pixels = np.full((8, 8), 0.5, np.float32)
    pixels[0] = np.nan
    found = gray(save(pixels, tmp_path / "a.tif"))
    assert (found[0] == 0).all()
    assert (found[1:] == 128).all()


def test_dark_images_are_warned_of(tmp_path, caplog):
    read_image(save((RAMP * 4095).astype(np.uint16), tmp_path / "a.png"))
    assert "use only a small part of this range, and become dark" in caplog.text


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(tmp_path, orientation):
    upright = Image.new("RGB", (6, 4))
    upright.putpixel((0, 0), (255, 255, 255))
    turned = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # what undoes each
    stored = upright.transpose(turned[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    assert read_image(tmp_path / "a.png").tobytes() == upright.tobytes()
    assert read_size(tmp_path / "a.png") == (6, 4)


def test_a_named_pipe_and_a_folder_are_not_read(tmp_path):
    """Opening the pipe would wait for a writer."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name in ("pipe.png", "folder.png"):
        with pytest.raises(UnreadableImage, match="not a regular file"):
            read_image(tmp_path / name)


def test_invalid_exif_data_do_not_lose_an_image(tmp_path):
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read_image(tmp_path / "a.jpg").size == (6, 4)


def write_stripes(root, suffix, convert):
    """Two classes, bright and dark, as images of some type."""
    random = np.random.RandomState(0)
    for split in ("train", "val"):
        for level, name in ((0.2, "dark"), (0.7, "bright")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(16):
                pixels = np.clip(level + 0.05 * random.randn(32, 32), 0, 1)
                save(convert(pixels), folder / f"{number}{suffix}")
    return root


TYPES = {
    "16-bit PNG": (".png", lambda x: (x * 65535).astype(np.uint16), "auto"),
    "float TIFF": (".tif", lambda x: x.astype(np.float32), "auto"),
    "12 in 16 bits": (".tif", lambda x: (x * 4095).astype(np.uint16), "[0, 4095]"),
    "counts": (".tif", lambda x: (x * 1e5).astype(np.int32), "[0, 1e5]"),
}


@pytest.mark.long
@pytest.mark.parametrize(("suffix", "convert", "value_range"), TYPES.values(), ids=TYPES)
def test_the_same_data_train_alike_in_every_type(tmp_path, suffix, convert, value_range):
    """Accuracy on the type is what it is on PNG."""
    words = (*SMALL, "DATA.TRAIN=[folder]", "DATA.TEST=[folder]", "DATA.NUM_CLASSES=2",
             "OPTIM.EPOCHS=6", "DATALOADER.BSZ=16", "DATALOADER.WORKERS=0")  # fmt: skip
    found = {}
    for name, own in (("png", (".png", lambda x: (x * 255).astype(np.uint8), "auto")),
                      ("type", (suffix, convert, value_range))):  # fmt: skip
        data, run = write_stripes(tmp_path / name, *own[:2]), tmp_path / f"run-{name}"
        settings = (*words, f"DATA.VALUE_RANGE={own[2]}")
        succeeds("train", "--output_dir", run, "--data", data, *settings)
        succeeds("evaluate", "--run", run)
        found[name] = results(run)["folder"]["top1"]
    assert found["type"] == found["png"] == 100


@pytest.mark.parametrize("wrong", ["[3, 1]", "[1]", "red"])
def test_a_wrong_range_is_refused(wrong):
    ended = vil("config", f"DATA.VALUE_RANGE={wrong}")
    assert ended.code == 2
    assert "DATA.VALUE_RANGE: expected" in ended.err


def test_entries_that_are_not_read_are_counted_once(tmp_path, caplog):
    for name in ("train/cat/1.png", "train/dog/2.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "train/cat/inner").mkdir()
    (tmp_path / "train/dog/photo.heic").touch()
    (tmp_path / "train/dog/.hidden").touch()
    Folder(tmp_path, "train")
    (line,) = caplog.messages
    assert line.startswith("2 entries of class folders are ignored (folders, or names without .j")
    assert line.endswith("train/cat/inner")
