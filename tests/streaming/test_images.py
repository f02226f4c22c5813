"""Images of every kind give the same result, and one that does not fit is refused in one line."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

import vil
from tests.common.streaming import FP64, make_model
from vil.errors import ConfigError, DataError
from vil.streaming import Normalize, prepare
from vil.streaming.images import open_pixels

ARCH = "l1,h1,d4,n1,s1,g1,p4,f3,a1_l2,h2,d8,n2,s1,g1,p2,f2,a0"
SIZE = (61, 83)
NORMALIZE = Normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


@pytest.fixture(scope="module")
def model():
    return make_model(ARCH)


@pytest.fixture(scope="module")
def pixels():
    """An RGB image (H, W, 3) of uint8."""
    return np.random.default_rng(0).integers(256, size=(*SIZE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def expected(model, pixels):
    """The logits of the whole image."""
    with torch.no_grad():
        return model(NORMALIZE(torch.from_numpy(pixels).permute(2, 0, 1)).double()[None])[0]


class Reader:
    """As rasterio reads: bands, and windows of rows and columns."""

    count, (height, width), dtypes = 3, SIZE, ("uint8",) * 3

    def __init__(self, pixels):
        self.pixels = pixels

    def read(self, *, window):
        rows, cols = (slice(*ends) for ends in window)
        return self.pixels.transpose(2, 0, 1)[:, rows, cols]


def save_npy(path, pixels):
    np.save(path, pixels)


def save_zarr(path, pixels):
    zarr = pytest.importorskip("zarr")
    array = zarr.open(str(path), mode="w", shape=pixels.shape, chunks=(16, 32, 3), dtype="u1")
    array[:] = pixels


def save_pillow(path, pixels):
    Image.fromarray(pixels).save(path)


def save_tiff(**options):
    def save(path, pixels):
        planes = options.get("planarconfig") == "separate"
        pixels = pixels.transpose(2, 0, 1) if planes else pixels
        tifffile = pytest.importorskip("tifffile")
        tifffile.imwrite(path, pixels, photometric="rgb", **options)

    return save


FILES = {
    "a.npy": save_npy,
    "b.zarr": save_zarr,
    "c.png": save_pillow,
    "d.tif": save_tiff(),
    "e.tif": save_tiff(tile=(32, 16), compression="zlib"),
    "f.tiff": save_tiff(planarconfig="separate"),
    "g.tif": save_tiff(planarconfig="separate", compression="zlib", rowsperstrip=7),
    "h.tif": save_tiff(bigtiff=True, byteorder=">"),
}


def in_strips(model, image, **options):
    """The logits, with the least strips. `vil.stream` would plan for its limit of memory first."""
    run = prepare(model, image, outputs=["logits"], **options)
    return run.execute(run.planner.with_strips(1)).logits


def assert_same(model, image, expected, **options):
    found = in_strips(model, image, **{"transform": NORMALIZE} | options)
    assert (found - expected).abs().max() <= FP64 * expected.abs().max()


@pytest.mark.parametrize("name", FILES)
def test_files(name, model, pixels, expected, tmp_path):
    FILES[name](tmp_path / name, pixels)
    assert_same(model, tmp_path / name, expected, layout="HWC")


def test_the_same_image_turned(model, pixels, expected, tmp_path):
    """The orientation of EXIF is applied, as everywhere in vil."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.fromarray(np.rot90(pixels).copy())
    turned.save(tmp_path / "a.png", exif=exif)
    assert_same(model, tmp_path / "a.png", expected)


def test_arrays(model, pixels, expected):
    dask, zarr = (pytest.importorskip(name) for name in ("dask.array", "zarr"))
    planes = pixels.transpose(2, 0, 1)
    for image in (planes, torch.from_numpy(planes.copy()), dask.from_array(planes, (3, 9, 20))):
        assert_same(model, image, expected)
    assert_same(model, zarr.array(pixels, chunks=(7, 30, 3)), expected, layout="HWC")
    assert_same(model, pixels[::-1][::-1], expected, layout="HWC")
    assert_same(model, Reader(pixels), expected)
    streamed = vil.stream(model, planes, transform=NORMALIZE).logits
    assert (streamed - expected).abs().max() <= FP64 * expected.abs().max()


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint32", "int64"])
def test_normalize_guesses_no_range(dtype, model, pixels, expected):
    image = torch.from_numpy(pixels.astype(dtype))
    message = f"values of type {dtype} have no known range: give Normalize a value_range"
    for given in (image, image.numpy()):
        with pytest.raises(ConfigError, match=message):
            in_strips(model, given, layout="HWC", transform=NORMALIZE)
    with pytest.raises(ConfigError, match=message):
        NORMALIZE(image)
    ranged = Normalize(NORMALIZE.mean.tolist(), NORMALIZE.std.tolist(), (0, 255))
    assert_same(model, image, expected, layout="HWC", transform=ranged)


def test_an_image_that_does_not_fit_is_refused(model, pixels, tmp_path):
    floats = np.zeros((3, *SIZE))
    (tmp_path / "a.txt").write_text("no image")
    (tmp_path / "a.png").write_text("no image")
    (tmp_path / "a.npy").write_text("no image")
    Image.fromarray(pixels).save(tmp_path / "c.jpg", "EPS")  # PIL would start Ghostscript
    os.mkfifo(tmp_path / "d.png")
    refused = {
        "has 61 channels in the layout CHW": (pixels, dict(layout="CHW", transform=NORMALIZE)),
        "has 2 channels in the layout CHW, but the model takes 3": (floats[:2], {}),
        "give transform=": (pixels, dict(layout="HWC")),
        "is not an image": (object(), {}),
        "has no tokens": (floats[:, :7], {}),
        "must return a tensor of the same shape": (floats, dict(transform=lambda strip: strip[:2])),
    }
    for message, (image, options) in refused.items():
        with pytest.raises(ConfigError, match=message):
            in_strips(model, image, **options)
    missing = {"a.txt": "expected a name", "b.png": "no such file", "a.png": "cannot be read",
               "a.npy": "cannot be read", "c.jpg": "not an image of a known format",
               "d.png": "not a regular file"}  # fmt: skip
    for name, message in missing.items():
        with pytest.raises(DataError, match=message) as error:
            in_strips(model, tmp_path / name, transform=NORMALIZE)
        assert "\n" not in str(error.value)


def test_truncated_files(model, pixels, tmp_path):
    """A TIFF file is refused before any work, a JPEG when it is decoded."""
    pytest.importorskip("tifffile")
    for name in ("d.tif", "e.tif", "f.tiff"):
        FILES[name](tmp_path / name, pixels)
    Image.fromarray(pixels).save(tmp_path / "a.jpg")
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-600])
        with pytest.raises(DataError, match="truncated|cannot be read") as error:
            in_strips(model, path, transform=NORMALIZE)
        assert "\n" not in str(error.value)


def test_tiff_files_whose_values_are_not_the_pixels(pixels, tmp_path):
    tifffile = pytest.importorskip("tifffile")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.tif", exif=exif)
    Image.fromarray(pixels).quantize(9).save(tmp_path / "palette.tif")
    tifffile.imwrite(tmp_path / "white.tif", pixels[..., 0], photometric="miniswhite")
    refused = {"turned": "its orientation is 6", "palette": "PALETTE", "white": "MINISWHITE"}
    for name, message in refused.items():
        with pytest.raises(DataError, match=message):
            open_pixels(tmp_path / f"{name}.tif", "HWC", 3)


def test_rows_that_cannot_be_read(model, pixels):
    class Broken(Reader):
        def read(self, *, window):
            if window[0][0]:
                raise OSError("the network is down\nat all")
            return super().read(window=window)

    with pytest.raises(DataError, match=r"rows \d+ to \d+ cannot be read: OSError: the network"):
        in_strips(model, Broken(pixels), transform=NORMALIZE)
