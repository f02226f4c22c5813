"""Read mask files: what their values or colors mean, and the file that names the classes.

A mask in memory is (H, W) int16 of class numbers 0..K-1, with IGNORE for pixels without a label. A
"code" is the value of a pixel, or its color as the integer 0xRRGGBB.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vil.data.image import UnreadableImage, open_image
from vil.tasks.detection.data.layouts import read_lines
from vil.tasks.segmentation import IGNORE
from vil.tasks.segmentation.predictions import default_palette
from vil.utils.console import printable
from vil.utils.errors import DataError
from vil.utils.exif import turn_upright
from vil.utils.wide_pixels import KEY_SCALES, layout_of

UNKNOWN = -2  # class number of a code without a class
GRAY = 0x010101  # a gray level times GRAY is the color
RAMP = np.arange(256) * GRAY  # a palette of all gray levels
CLASS_FILES = ("classes.txt", "classes.csv", "classes.json")
MAX_BYTES = 1 << 20  # of a file of classes
IGNORED_NAME = "ignore"  # name in a file of classes, for pixels without a label
COLOR_LINE = re.compile(r"(.*?)[\s,;]+(\d+)[\s,;]+(\d+)[\s,;]+(\d+)")
CVAT_LINE = re.compile(r"(.*?):(\d+),(\d+),(\d+):[^:]*:[^:]*")  # of CVAT's labelmap.txt
TWO_CLASSES = "'background 0 0 0' and 'object 255 255 255'"  # lines for masks of 0 and 255
HEADER = re.compile(r"name\W+r(ed)?\W+g(reen)?\W+b(lue)?", re.IGNORECASE)
CSV_HEADER = ("name", "class", "label")  # first line of a CSV file without colors
LISTED = 3  # codes without a class in a message
Color = tuple[int, int, int]


class MaskFile(NamedTuple):
    """The content of a mask file.

    codes (H, W): values or, if is_color, colors. white: value of white in a gray mask of up to 8
    bits. palette (n,): color of each value, None without a palette or with one that is a gray ramp.
    """

    codes: np.ndarray
    white: int = 255
    palette: np.ndarray | None = None
    is_color: bool = False

    def value_colors(self, ignore: int) -> dict[int, int]:
        """Return {value: color in the palette} of the values in the mask other than `ignore`."""
        known = [] if self.palette is None else self.palette.tolist()
        values = find_values(self.codes) if known else []
        return {value: known[value] for value in values if value != ignore and value < len(known)}


def read_mask_file(path: str | Path) -> MaskFile:
    """Read a mask file, turned upright by its own EXIF orientation, without its alpha channel.

    A gray image that was saved as GIF has a palette, which may lack the levels that do not occur.
    Its values are the levels, as in other formats. Raises UnreadableImage if the file is no image,
    or an image of floats.
    """
    with open_image(path) as image:
        scale = KEY_SCALES.get(layout_of(image), 1)  # with which Pillow multiplies 2 or 4 bits
        image.load()
        turn_upright(image)
        mode, codes, palette = image.mode, np.asarray(image), None
        if mode in ("P", "PA"):
            palette = pack_colors(np.reshape(image.getpalette("RGB"), (-1, 3)))
        if image.format == "GIF" and palette is not None and not (palette % GRAY).any():
            codes, palette = (palette // GRAY)[codes], np.where(np.isin(RAMP, palette), RAMP, 0)
    if mode in ("RGB", "RGBA", "RGBX"):
        return MaskFile(pack_colors(codes[..., :3]), is_color=True)
    if mode in ("LA", "PA"):
        codes = codes[..., 0]
    if codes.ndim != 2 or codes.dtype.kind == "f":
        raise UnreadableImage(
            f"the file has the mode {mode}, but masks have gray levels, a palette or RGB colors"
        )
    if palette is not None:
        used = np.trim_zeros(palette, "b")  # Pillow appends black entries
        if len(used) < 2 or (used != RAMP[: len(used)]).any():
            return MaskFile(codes, palette=palette)
    white = 1 if mode == "1" else 255 // scale  # levels of 16 bits are read as they are
    return MaskFile(codes.astype(np.int32) // scale, white)


def find_values(codes: np.ndarray) -> list[int]:
    """Return the sorted values in a mask."""
    if codes.min() >= 0 and codes.max() < 256:  # faster
        return np.flatnonzero(np.bincount(codes.ravel())).tolist()
    return np.unique(codes).tolist()


def compare_colors(
    known: Mapping[int, tuple[int, str]], found: Mapping[int, int], name: str
) -> str:
    """Return the message about a palette that contradicts other palettes, "" if it does not.

    known: {value: (its color in other palettes, one of their masks)}. found: {value: its color in
    the palette of the mask `name`}.
    """
    for value, color in found.items():
        other, first = known.get(value, (color, ""))
        if color != other:
            texts = ["{} {} {}".format(*unpack_colors(code)) for code in (other, color)]
            return (
                f"the palettes of {first} and {name} do not fit: the color of value {value} is "
                f"{texts[0]} and {texts[1]}: write {CLASS_FILES[0]} with a line 'name red green "
                "blue' for each class, or save the masks without a palette"
            )
    return ""


def pack_colors(colors: np.ndarray) -> np.ndarray:
    """Return colors (..., 3) as integers 0xRRGGBB (...) int32."""
    red, green, blue = np.moveaxis(colors.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue


def unpack_colors(codes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return integers 0xRRGGBB (n,) as colors (n, 3) uint8."""
    codes = np.asarray(codes)
    return np.stack([codes >> 16, codes >> 8, codes], axis=-1).astype(np.uint8)


class Legend:
    """The classes of mask files, and the codes that stand for them.

    classes: names of the K classes. palette (K, 3) uint8: their colors in drawings. value_colors:
    {value: (color, mask)} in the palettes of training masks, if the classes have no colors.

    A mask of colors needs classes with colors. If there are colors, then masks with a palette are
    read by them too, because image editors renumber a palette, unless the palette is a gray ramp.
    If all colors are gray, gray masks are read by them too, such as masks of 0 and 255. All other
    masks are read by their values, whose colors in a palette must be those in `value_colors`. In a
    mask with a palette, the value `ignore` has no label, unless its color is that of a class.
    """

    def __init__(
        self,
        classes: Sequence[str],
        values: Mapping[int, int],
        colors: Mapping[int, int] | None = None,
        *,
        source: object,
        ignore: int,
        palette: np.ndarray | None = None,
    ):
        """values, colors: {code: class number or IGNORE}. ignore: value for IGNORE, unless it is a
        gray color of a class. source: where the classes are from, for messages. palette: by default
        the colors, or different colors if there are none."""
        self.classes, self.source, self.ignore = list(classes), source, ignore
        self.values, self.colors = {**values, ignore: IGNORE}, dict(colors or {})
        self.value_colors: dict[int, tuple[int, str]] = {}
        self.is_gray = bool(colors) and all(color % GRAY == 0 for color in self.colors)
        if self.is_gray:
            self.colors.setdefault(ignore * GRAY, IGNORE)
        self.palette = default_palette(len(self.classes)) if palette is None else palette
        for color, number in self.colors.items() if palette is None else ():
            if number >= 0:
                self.palette[number] = unpack_colors(color)

    def read(self, path: str | Path) -> np.ndarray:
        """Read a mask (H, W) int16. Raises UnreadableImage if the file cannot be read, has codes
        without a class, or has a palette that contradicts `value_colors`."""
        codes, white, palette, by_color = mask = read_mask_file(path)
        found = mask.value_colors(self.ignore) if self.value_colors else {}
        if text := compare_colors(self.value_colors, found, "this mask"):
            raise UnreadableImage(text)
        values, no_color = codes, "no level of 8 bits"
        if by_color and not self.colors:
            raise UnreadableImage(
                f"the mask has RGB colors, but {self.source} has no colors: add them in lines of "
                "'name red green blue'"
            )
        if palette is not None and self.colors:
            codes = np.pad(palette, (0, 256 - len(palette)), constant_values=-1)[values]
            by_color, no_color = True, "a value without a color in the palette"
        elif self.is_gray and not by_color:
            levels = codes * (255 // white)
            codes, by_color = np.where((levels >= 0) & (levels < 256), levels * GRAY, -1), True
        table = self.colors if by_color else self.values
        numbers = find_numbers(codes, table)
        if palette is not None and by_color:
            numbers[(numbers == UNKNOWN) & (values == self.ignore)] = IGNORE
        if (unknown := numbers == UNKNOWN).any():
            raise UnreadableImage(explain_unknown(codes[unknown], by_color, self.source, no_color))
        return numbers


def find_numbers(codes: np.ndarray, table: Mapping[int, int]) -> np.ndarray:
    """Return the class numbers (int16) of codes, UNKNOWN for those that are not in the table."""
    if codes.size > 1 << 16 and codes.min() >= 0 and codes.max() < 1 << 16:  # faster
        return find_numbers(np.arange(int(codes.max()) + 1), table)[codes]
    known = np.array(sorted(table))
    numbers = np.array([table[code] for code in sorted(table)], np.int16)
    at = np.searchsorted(known, codes).clip(max=len(known) - 1)
    return np.where(known[at] == codes, numbers[at], np.int16(UNKNOWN))


def explain_unknown(codes: np.ndarray, by_color: bool, source: object, no_color: str) -> str:
    """Return the message about a mask with pixels without a class. codes (n,): of these pixels.
    no_color: text for the color -1."""
    found, counts = np.unique(codes, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:LISTED]
    names = [str(code) for code in found[order].tolist()]
    if by_color:
        colors = zip(names, unpack_colors(found[order]).tolist())
        names = [no_color if name == "-1" else "{} {} {}".format(*color) for name, color in colors]
    pairs = zip(names, counts[order].tolist())
    listed = ", ".join(f"{name} ({count} pixels)" for name, count in pairs)
    more = ", ..." if len(found) > LISTED else ""
    what = "colors" if by_color else "values"
    return f"the mask has {what} without a class: {listed}{more}; the classes are from {source}"


# ---- files of classes


def read_legend(file: Path, ignore: int) -> Legend:
    """Read the classes of masks from a text, CSV or JSON file.

    A line is "name", or "name red green blue" with spaces, tabs, commas or semicolons between, or
    "name:red,green,blue::" as in CVAT's labelmap.txt. JSON is a list of names, or {name: [red,
    green, blue]}. The value of a class in masks of values is its place, from 0. Entries with the
    name `ignore` are no classes, but pixels without a label. Empty lines, lines that begin with #,
    the line "name,r,g,b", and a first line of CSV_HEADER in a CSV file are skipped.

    ignore: value of pixels without a label, also if it is the place of a class. Raises DataError
    for an invalid file, for a single class, and for a class without a color whose place is an
    `ignore` of 255 (the default) or more.
    """
    entries = parse_json(file) if file.suffix.lower() == ".json" else parse_lines(file)
    has_color = [color is not None for _, color in entries]
    classes = [name for name, _ in entries if name != IGNORED_NAME]
    if any(has_color) and not all(has_color):
        name = printable(entries[has_color.index(False)][0])
        raise DataError(f"{file}: {name} has no color, but other classes have one: add it")
    numbers, values, colors = {name: i for i, name in enumerate(classes)}, {}, {}
    if len(numbers) < len(classes) or not classes:
        twice = next((name for name in classes if classes.count(name) > 1), None)
        what = f"has the class {printable(twice)} twice" if twice else "names no class"
        raise DataError(f"{file} {what}: correct it")
    if len(classes) < 2:
        raise DataError(
            f"{file} names the class {printable(classes[0])} only, but pixels need two or more: "
            f"write the lines {TWO_CLASSES} for masks of 0 and 255, for example"
        )
    for value, (name, color) in enumerate(entries):
        values[value] = numbers.get(name, IGNORE)
        if color is None:
            continue
        code = int(pack_colors(np.array(color)))
        if colors.setdefault(code, values[value]) != values[value]:
            shown = "{} {} {}".format(*color)
            raise DataError(f"{file}: {printable(name)} has the color {shown} of another class")
    if ignore >= 255 and not colors and values.get(ignore, IGNORE) != IGNORE:
        raise DataError(
            f"{file}: the value {ignore}, which is ignored, is the class "
            f"{printable(entries[ignore][0])}: set SEGMENTATION.IGNORE 65535"
        )
    return Legend(classes, values, colors, source=file, ignore=ignore)


def parse_lines(file: Path) -> list[tuple[str, Color | None]]:
    """Parse the lines of a file of classes. Returns [(name, color or None)]."""
    entries: list[tuple[str, Color | None]] = []
    is_csv = file.suffix.lower() == ".csv"
    for number, line in enumerate(map(str.strip, read_lines(file, MAX_BYTES)), 1):
        is_header = is_csv and number == 1 and line.strip("\"'").lower() in CSV_HEADER
        if not line or line.startswith("#") or is_header or HEADER.fullmatch(line):
            continue
        found = COLOR_LINE.fullmatch(line) or CVAT_LINE.fullmatch(line)
        name = found[1] if found else line
        color = tuple(min(int(text), 999) for text in found.groups()[1:]) if found else None
        entries.append(check_entry(name.strip("\"' "), color, f"{file}, line {number}"))
    return entries


def parse_json(file: Path) -> list[tuple[str, Color | None]]:
    """Parse a JSON file of classes. Returns [(name, color or None)]."""
    try:
        content = json.loads("\n".join(read_lines(file, MAX_BYTES)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if isinstance(content, list) and all(isinstance(name, str) for name in content):
        return [check_entry(name, None, file) for name in content]
    if not isinstance(content, dict):
        raise DataError(f"{file} must be a list of names, or map names to [red, green, blue]")
    return [check_entry(name, color, file) for name, color in content.items()]


def check_entry(name: str, color: object, where: object) -> tuple[str, Color | None]:
    """Return a class and its color. Raises DataError if one of them is invalid."""
    if not name or not name.isprintable():
        raise DataError(f"{where}: {name!r:.40} is no name of a class: correct it")
    if color is None:
        return name, None
    try:
        red, green, blue = color
        is_valid = all(type(c) is int and 0 <= c <= 255 for c in (red, green, blue))
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise DataError(f"{where}: {name} has the color {color!r:.40}: give three of 0..255")
    return name, (red, green, blue)
