"""The same file gives the same pixels from every source, or is refused by every source.

The table is made of modes x bit depths x formats, each in the eight EXIF orientations. The expected
pixels are computed from the stored numbers, without PIL.
"""

import io
import json
import struct
import zlib
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.common.data_files import write_folder, write_shard, write_tar, write_tsv, write_zip
from vil.config import get_config
from vil.data import build_dataset
from vil.data.datasets.image_list import ImageList, ImageSource
from vil.data.image import UnreadableImage, read_image, read_size
from vil.streaming.images import open_pixels
from vil.tasks.detection.data.datasets import CocoDataset
from vil.utils.errors import ConfigError, DataError
from vil.utils.extras import is_installed
from vil.workflows.predict import open_images

H, W = 5, 7
RANDOM = np.random.default_rng(0)
ORIENTATIONS = range(1, 9)
RANGE = (0, 4095)
GRAY, RGB, PALETTE, GRAY_ALPHA, RGBA = 0, 2, 3, 4, 6  # color types of PNG
UNTURN = {  # {orientation: from the upright array to the stored one}
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


class Cell(NamedTuple):
    """A file, and its upright RGB pixels (H, W, 3) without and with RANGE; None: refused."""

    suffix: str
    content: bytes
    plain: np.ndarray | None
    ranged: np.ndarray | None


def chunk(kind, data):
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def png(array, color_type, depth, *, palette=None, key=None, orientation=1):
    """array (H, W, C): samples of `depth` bits."""
    array = np.ascontiguousarray(array)
    height, width, _ = array.shape
    if depth == 16:
        rows = array.astype(">u2").reshape(height, -1).view(np.uint8)
    else:
        bits = np.unpackbits(array.astype(np.uint8)[..., None], axis=-1)[..., 8 - depth :]
        rows = np.packbits(bits.reshape(height, -1), axis=1)
    head = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    parts = [chunk(b"IHDR", head)]
    exif = Image.Exif()
    exif[0x0112] = orientation
    parts += [chunk(b"eXIf", exif.tobytes()[6:])]
    parts += [chunk(b"PLTE", palette.tobytes())] if palette is not None else []
    parts += [chunk(b"tRNS", key)] if key is not None else []
    parts += [chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def tiff(array, photometric, *, orientation=1, **options):
    import tifffile

    buffer, tags = io.BytesIO(), [(274, "H", 1, orientation, True)]
    if options.get("planarconfig") == "separate":
        array = array.transpose(2, 0, 1)
    array = np.ascontiguousarray(array)
    tifffile.imwrite(buffer, array, photometric=photometric, extratags=tags, **options)
    return buffer.getvalue()


def on_white(color, alpha):
    """color (H, W, 3) uint8, alpha (H, W) of 0 and 255."""
    return np.where(alpha[..., None] == 255, color, 255)


def to_8(values, value_range):
    low, high = value_range or (0, 65535)
    return ((values - low) / (high - low) * 256).clip(0, 255).astype(np.uint8)


def gray3(values):
    return values.repeat(3, -1)


def ink(values):
    """CMYK (H, W, 4) uint8 to RGB, as PIL does without a profile."""
    return np.asarray(Image.merge("CMYK", [Image.fromarray(v) for v in np.moveaxis(values, -1, 0)])
                      .convert("RGB"))  # fmt: skip


def samples(depth, channels):
    values = RANDOM.integers(0, min(2**depth, 8000), (H, W, channels))
    return values.astype(np.uint16 if depth == 16 else np.uint8)


def make_planar(depth, compression, convert):
    """PIL reads separate channels of 16 bits as 8 bits if compressed, and otherwise wrongly."""
    if depth == 8:
        return convert
    return None if compression is None else lambda v, r: None if r else convert(v, r)


def make_cells(orientation):
    """Yield (name, Cell) for every mode, bit depth and format."""
    turn, mask = UNTURN[orientation], RANDOM.integers(0, 2, (H, W)).astype(np.uint8) * 255

    def cell(values, write, convert, suffix="png"):
        """convert: stored numbers and a range to RGB; None: refused."""
        content = write(turn(values), orientation=orientation)
        if convert is None:
            return Cell(suffix, content, None, None)
        return Cell(suffix, content, convert(values, ()), convert(values, RANGE))

    for depth in (1, 2, 4, 8, 16):
        factor = 255 // (2**depth - 1)
        values, key = samples(depth, 1), int(samples(depth, 1)[0, 0, 0])
        values[0, 0] = key

        def eight(v, r, depth=depth, factor=factor):
            return to_8(v, r) if depth == 16 else v * np.uint8(factor)

        def keyed(v, r, key=key, eight=eight):
            return on_white(gray3(eight(v, r)), np.where((v == key).all(-1), 0, 255))

        def write_gray(a, depth=depth, **own):
            return png(a, GRAY, depth, **own)

        def write_keyed(a, depth=depth, key=key, **own):
            return png(a, GRAY, depth, key=struct.pack(">H", key), **own)

        yield f"png gray {depth}", cell(values, write_gray, lambda v, r, e=eight: gray3(e(v, r)))
        yield f"png gray {depth} key", cell(values, write_keyed, keyed)
        if depth < 16:
            palette = RANDOM.integers(0, 256, (2**depth, 3)).astype(np.uint8)
            opacity = RANDOM.integers(0, 2, 2**depth).astype(np.uint8) * 255

            def write_palette(a, depth=depth, palette=palette, **own):
                return png(a, PALETTE, depth, palette=palette, **own)

            def write_clear(a, depth=depth, palette=palette, opacity=opacity, **own):
                return png(a, PALETTE, depth, palette=palette, key=opacity.tobytes(), **own)

            yield (
                f"png P {depth}",
                cell(values, write_palette, lambda v, r, p=palette: p[v[..., 0]]),
            )
            yield (
                f"png P {depth} clear",
                cell(values, write_clear, lambda v, r, p=palette, o=opacity: on_white(
                    p[v[..., 0]], o[v[..., 0]])),
            )  # fmt: skip
    for depth in (8, 16):
        full = 2**depth - 1
        alpha = (mask.astype(np.uint16) * (full // 255))[..., None]

        def eight(v, r, depth=depth):
            return to_8(v, r) if depth == 16 else v.astype(np.uint8)

        def clear(v, r, eight=eight, full=full):
            color = eight(v[..., :-1], r)
            color = gray3(color) if color.shape[-1] == 1 else color
            return on_white(color, np.where(v[..., -1] == full, 255, 0))

        color = samples(depth, 3)
        for kind, name, channels in ((GRAY_ALPHA, "LA", 1), (RGBA, "RGBA", 3)):
            values = np.concatenate([color[..., :channels], alpha.astype(color.dtype)], -1)
            yield (
                f"png {name} {depth}",
                cell(values, lambda a, k=kind, d=depth, **own: png(a, k, d, **own), clear),
            )
        key = color[0, 0]

        def keyed(v, r, key=key, eight=eight):
            return on_white(eight(v, r), np.where((v == key).all(-1), 0, 255))

        def write_keyed(a, depth=depth, key=key, **own):
            return png(a, RGB, depth, key=key.astype(">u2").tobytes(), **own)

        yield (
            f"png RGB {depth}",
            cell(color, lambda a, d=depth, **own: png(a, RGB, d, **own), eight),
        )
        yield f"png RGB {depth} key", cell(color, write_keyed, keyed)
        if not is_installed("tifffile"):
            continue

        def write_tiff(a, photometric="rgb", **own):
            return lambda a, **more: tiff(a, photometric, **own, **more)

        for compression in (None, "deflate"):
            for order in "<>":
                own = dict(compression=compression, byteorder=order)
                where = f"{depth} {compression} {order}"
                yield f"tiff RGB {where}", cell(color, write_tiff(0, **own), eight, "tiff")
                planar = make_planar(depth, compression, eight)
                yield (
                    f"tiff planar {where}",
                    cell(color, write_tiff(0, planarconfig="separate", **own), planar, "tiff"),
                )
                gray = color[..., 0]
                yield f"tiff gray {where}", cell(
                    gray, write_tiff(0, "minisblack", **own),
                    lambda v, r, e=eight: gray3(e(v[..., None], r)), "tiff",
                )  # fmt: skip
                rgba = np.concatenate([color, alpha.astype(color.dtype)], -1)
                yield (
                    f"tiff RGBA {where}",
                    cell(rgba, write_tiff(0, extrasamples=["unassalpha"], **own), clear, "tiff"),
                )
                cmyk = samples(depth, 4)
                yield f"tiff CMYK {where}", cell(
                    cmyk, write_tiff(0, "separated", **own),
                    lambda v, r, e=eight: ink(e(v, r)), "tiff",
                )  # fmt: skip
        inverted = None if depth == 16 else lambda v, r: gray3(255 - v[..., None])
        yield (
            f"tiff white is 0 {depth}",
            cell(color[..., 0], write_tiff(0, "miniswhite"), inverted, "tiff"),
        )
    if is_installed("tifffile"):
        unit = RANDOM.random((H, W)).astype(np.float32)
        yield "tiff float", cell(
            unit, lambda a, **own: tiff(a, "minisblack", **own),
            lambda v, r: gray3(to_8(v[..., None].astype(float), r or (0, 1))), "tiff",
        )  # fmt: skip
        three = RANDOM.random((H, W, 3)).astype(np.float32)
        yield "tiff float RGB", cell(three, lambda a, **own: tiff(a, "rgb", **own), None, "tiff")
        bands = samples(8, 6)
        yield (
            "tiff pages",  # of which the first is the image
            cell(bands, lambda a, **own: tiff(a.transpose(2, 0, 1), "minisblack", **own),
                 lambda v, r: gray3(v[..., :1]), "tiff"),
        )  # fmt: skip


@pytest.fixture(scope="module")
def cells():
    return {
        f"{name} {orientation}".replace(" ", "_").replace("<", "II").replace(">", "MM"): cell
        for orientation in ORIENTATIONS
        for name, cell in make_cells(orientation)
    }


@pytest.fixture(scope="module")
def upright_and_turned(cells):
    """The cells in two orientations: the other sources hand their bytes to the same function."""
    return {name: cell for name, cell in cells.items() if name.endswith(("_1", "_6"))}


def assert_same(cells, read, value_range=(), *, may_refuse=False):
    """read: from the name and the cell to the image."""
    wrong = {}
    for name, cell in cells.items():
        expected = cell.ranged if value_range else cell.plain
        try:
            found = np.asarray(read(name, cell))
        except (UnreadableImage, ConfigError, DataError) as error:
            if (expected is not None and not may_refuse) or "\n" in str(error):
                wrong[name] = str(error)
            continue
        if expected is None:
            wrong[name] = "was not refused"
        elif found.shape != expected.shape or not np.array_equal(found, expected):
            wrong[name] = found.ravel()[:6], expected.ravel()[:6]
    assert not wrong


def files_of(cells):
    return {f"c0/{name}.{cell.suffix}": cell.content for name, cell in cells.items()}


def open_folder(root, files):
    write_folder(root, "train", files)
    return build_dataset("folder", root, "train")


def open_table(root, files):
    write_folder(root, "train", files)
    lines = ["path,label", *(f"train/{name},a" for name in files)]
    (root / "labels.csv").write_text("\n".join(lines))
    return build_dataset("labels.csv", root, "train")


def open_zip(root, files):
    write_zip(root, "train", files)
    return build_dataset("imagenet", root, "train")


def open_tar(root, files):
    write_tar(root, "train", files)
    return build_dataset("tar", root, "train")


def open_tsv(root, files):
    write_tsv(root, "train", files)
    return build_dataset("tsv", root, "train")


def open_shard(root, files):
    stems = {name.removeprefix("c0/"): content for name, content in files.items()}
    labels = {f"{name.rsplit('.', 1)[0]}.cls": "0" for name in stems}
    write_shard(
        root / "x.tar", {name: {**stems, **labels}[name] for name in sorted({**stems, **labels})}
    )
    return build_dataset("x.tar", root, "train")


def open_hf(root, files):
    datasets = pytest.importorskip("datasets")
    types = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=1)}
    columns = {
        "image": [{"bytes": content, "path": None} for content in files.values()],
        "label": [0] * len(files),
    }
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_dict(columns, features=datasets.Features(types))
    saved.save_to_disk(root / "hf")
    return build_dataset("hf", root, "train", folder="hf", all_rows=True)


SOURCES = (open_folder, open_table, open_zip, open_tar, open_tsv, open_shard, open_hf)


@pytest.mark.parametrize("value_range", [(), RANGE], ids=["plain", "ranged"])
@pytest.mark.parametrize("source", SOURCES)
def test_datasets(cells, upright_and_turned, source, value_range, tmp_path):
    cells = cells if source is open_folder else upright_and_turned
    dataset = source(tmp_path, files_of(cells))
    dataset.value_range = value_range
    index = {dataset.content(i): i for i in range(len(dataset))}
    assert_same(cells, lambda name, cell: dataset.image(index[cell.content]), value_range)


@pytest.mark.parametrize("value_range", [(), RANGE], ids=["plain", "ranged"])
@pytest.mark.parametrize("source", ["path", "bytes", "PIL"])
def test_prediction(cells, upright_and_turned, source, value_range, tmp_path):
    cells = cells if source == "path" else upright_and_turned
    options = [f"DATA.VALUE_RANGE={list(value_range)}"] if value_range else []
    cfg = get_config(opts=options)

    def read(name, cell):
        if source == "bytes":
            return ImageList([ImageSource(name, cell.content)], value_range).image(0)
        path = tmp_path / f"{name}.{cell.suffix}"
        path.write_bytes(cell.content)
        try:
            given = path if source == "path" else Image.open(path)
        except OSError as error:  # PIL itself cannot open it
            raise UnreadableImage(str(error)) from error
        return open_images(given, cfg).image(0)

    assert_same(cells, read, value_range)


@pytest.mark.parametrize("value_range", [(), RANGE], ids=["plain", "ranged"])
def test_detection(upright_and_turned, value_range, tmp_path):
    cells = upright_and_turned
    images = [
        {"id": number, "file_name": f"{name}.{cell.suffix}", "width": W, "height": H}
        for number, (name, cell) in enumerate(cells.items())
    ]
    write_folder(tmp_path, "train", files_of(cells))
    file = tmp_path / "a.json"
    categories = [{"id": 1, "name": "a"}]
    file.write_text(json.dumps({"images": images, "annotations": [], "categories": categories}))
    dataset = CocoDataset(tmp_path / "train/c0", file, "val", masks=False, keep_empty=True)
    dataset.value_range = value_range
    index = {dataset.sample_name(i): i for i in range(len(dataset))}

    def read(name, cell):
        return dataset.image(index[f"{name}.{cell.suffix}"])

    assert_same(cells, read, value_range)


@pytest.mark.skipif(not is_installed("tifffile"), reason="needs vil[stream]")
def test_streams(cells, tmp_path):
    def read(name, cell):
        path = tmp_path / f"{name}.{cell.suffix}"
        path.write_bytes(cell.content)
        pixels = open_pixels(path, "HWC", 3)
        rows = np.concatenate([pixels.read(row, row + 1).numpy() for row in range(H)], 1)
        rows = rows.transpose(1, 2, 0)
        return to_8(rows, ()) if pixels.dtype == "uint16" else rows

    readable = {name: cell for name, cell in cells.items() if cell.plain is not None}
    assert_same(readable, read, may_refuse=True)


def test_sizes_are_those_of_the_pixels(cells, tmp_path):
    for cell in cells.values():
        if cell.plain is not None:
            assert read_size(io.BytesIO(cell.content)) == (W, H)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_partly_transparent_pixels_are_mixed_with_the_background(mode):
    channels = len(mode)
    values = RANDOM.integers(0, 256, (H, W, channels)).astype(np.uint8)
    content = png(values, GRAY_ALPHA if mode == "LA" else RGBA, 8)
    background = np.array([10, 200, 90])
    found = np.asarray(read_image(io.BytesIO(content), background=background.tolist()), float)
    share = values[..., -1:] / 255
    assert np.abs(found - values[..., :-1] * share - background * (1 - share)).max() <= 1


def test_bands_keep_16_bits():
    """LA and RGBA files as bands of a model, with and without a value range."""
    for kind, channels in ((GRAY_ALPHA, 2), (RGBA, 4)):
        values = samples(16, channels)
        for value_range, high in (((), 65535), (RANGE, 4095)):
            content = io.BytesIO(png(values, kind, 16))
            found = read_image(content, value_range, channels=channels).numpy()
            assert np.allclose(found.transpose(1, 2, 0), (values / high).clip(0, 1))
