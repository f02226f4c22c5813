"""Images of more than 8 bits are converted by a stated rule, and turned upright."""

import numpy as np
import pytest
from PIL import Image

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


def test_invalid_exif_data_do_not_lose_an_image(tmp_path):
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read_image(tmp_path / "a.jpg").size == (6, 4)
