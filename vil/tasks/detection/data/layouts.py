"""Find and read detection datasets in the layouts of common tools: COCO, YOLO and Pascal VOC.

LAYOUTS lists the layouts in the order in which they are looked for. The annotations of each are
converted to COCO's format in memory, so that all checks and metrics are the same for all of them.
Images are sorted by their name, so that every layout of the same images has the same order. The ids
of converted annotations name their file and line, for messages.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np
import yaml

from vil.data.classes import list_classes, normalize_name
from vil.data.datasets.folder import EXTENSIONS
from vil.data.image import UnreadableImage, read_size
from vil.tasks.detection.data.coco_json import AnnotationSource, read_tables
from vil.utils.console import printable
from vil.utils.errors import DataError
from vil.utils.plural import plural
from vil.utils.safe_files import path_below, regular_file

Roots = Sequence[str | Path]  # further folders to which symbolic links may point
Files = tuple[Path, Path | AnnotationSource]  # the image folder, the annotations

# {split: names of it in files and folders}; "default" is CVAT's
SPLIT_NAMES = {
    "train": ("train", "trainval", "default"),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
}
COCO_FILES = (
    "{}/_annotations.coco.json",  # Roboflow
    "annotations/instances_{}2017.json",
    "annotations/instances_{}.json",
    "annotations/{}.json",
    "{}.json",
)
COCO_IMAGES = ("{}2017", "images/{}2017", "images/{}", "{}", "images")
# of training images only
LABEL_STUDIO = "result.json"  # beside the folder that its file names begin with
SINGLE_FILES = ("_annotations.coco.json", "annotations.json", LABEL_STUDIO)
VOC_FOLDERS = ("Annotations", "annotations")
VOC_IMAGES = ("JPEGImages", "images", "Images")
CORNERS = ("xmin", "ymin", "xmax", "ymax")
YOLO_LINE = (
    "expected: class x y width height, or class x1 y1 x2 y2 x3 y3 ... of a polygon, in fractions "
    "of the image's size"
)
# Limits of files in bytes, so that no file exhausts the memory.
MAX_YAML, MAX_XML, MAX_LABELS, MAX_LIST = 1 << 18, 1 << 22, 1 << 24, 1 << 26


class Layout(NamedTuple):
    """A layout of datasets.

    marks: what it is recognized by, for messages. find: function (root, roots) that returns
    {split: location}, {} if a folder does not have this layout. read: function (root, location,
    roots) that returns the image folder and the annotations of a split.
    """

    marks: str
    find: Callable[[Path, Roots], dict[str, Any]]
    read: Callable[[Path, Any, Roots], Files]


def open_layout(root: str | Path, split: str, roots: Roots = ()) -> Files:
    """Return the image folder and the annotations of a split of the dataset in the folder `root`.

    split: "train", "val" or "test". roots: further folders to which symbolic links may point.
    Raises DataError if the folder has no known layout, has no such split, or has an invalid file.
    """
    name, splits = find_layout(root, roots)
    if split not in splits:
        remedy = f"expected {LAYOUTS[name].marks}"
        if split != "train":
            key = f"DATA.{split.upper()}_FRACTION"
            remedy = f"add them, or set {key} to 0.2 to use a part of the training images"
        raise DataError(f"{root} (layout {name}) has no {split} images: {remedy}")
    return LAYOUTS[name].read(Path(root), splits[split], roots)


def find_layout(root: str | Path, roots: Roots = ()) -> tuple[str, dict[str, Any]]:
    """Return (name in LAYOUTS, {split: location}) of the dataset in the folder `root`. Raises
    DataError if the folder has no known layout."""
    if not Path(root).is_dir():
        raise DataError(f"there is no folder {root}: check DATA.PATH")
    for name, layout in LAYOUTS.items():
        if splits := layout.find(Path(root), roots):
            return name, splits
    looked_for = "; ".join(f"{name}: {layout.marks}" for name, layout in LAYOUTS.items())
    raise DataError(f"{root} is no detection dataset of a known layout; looked for {looked_for}")


# ---- COCO


def find_coco(root: Path, roots: Roots) -> dict[str, Files]:
    splits = {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            files = [root / pattern.format(name) for pattern in COCO_FILES]
            if file := next(filter(Path.is_file, files), None):
                splits.setdefault(split, (coco_images(root, file, name), file))
    single = next((root / name for name in SINGLE_FILES if (root / name).is_file()), None)
    if single and not splits:
        splits["train"] = coco_images(root, single, "train"), single
    return splits


def coco_images(root: Path, file: Path, name: str) -> Path:
    """Return the image folder of an annotation file. name: the split's name in the file's path."""
    if file.name == SINGLE_FILES[0]:
        return file.parent
    if file.name == LABEL_STUDIO:
        with suppress(DataError):  # which reading the annotations raises again
            images = read_tables(file)["images"]
            if images and (root / images[0]["file_name"]).is_file():
                return root
    folders = (root / pattern.format(name) for pattern in COCO_IMAGES)
    return next(filter(Path.is_dir, folders), root)


def read_coco(root: Path, location: Files, roots: Roots) -> Files:
    folder, file = location
    return folder, AnnotationSource(check_inside(root, file, "the dataset", roots), by_name=True)


# ---- YOLO


def find_yolo(root: Path, roots: Roots) -> dict[str, tuple]:
    """Return {split: (names of the classes, data.yaml, whether the labels have keypoints, paths of
    folders or lists of images)}."""
    files = [root / "data.yaml"]
    if not files[0].is_file():
        files = sorted([*root.glob("*.yaml"), *root.glob("*.yml")])
    if len(files) != 1:
        return {}
    (file,) = files
    content = read_yaml(check_inside(root, file, "the dataset", roots))
    if "names" not in content:
        return {}
    names, splits = parse_names(content, file), {}
    base = content.get("path")
    folders = [root / base, root] if isinstance(base, str) else [root]
    for split in SPLIT_NAMES:
        given = content.get(split) or []
        entries = [given] if isinstance(given, str) else given
        if not (isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)):
            raise DataError(f"{file}: {split} must be a folder, a list of images or several such")
        paths = [resolve(root, folders, entry) for entry in entries]
        if split == "train" and None in paths:
            raise DataError(
                f"{file}: train names {printable(entries[paths.index(None)])}, which is not in "
                f"{root}: correct this path"
            )
        if any(paths):
            has_keypoints = "kpt_shape" in content
            splits[split] = names, file, has_keypoints, [path for path in paths if path]
    return splits


def read_yaml(file: Path) -> dict:
    """Read a YAML file as a dict of texts. Names such as `no` or `1` stay as they are written."""
    try:
        content = yaml.load(read_small(file, MAX_YAML), yaml.BaseLoader)  # noqa: S506 - only texts
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    return content if isinstance(content, dict) else {}


def parse_names(content: dict, file: Path) -> list[str]:
    """Return the class names of a data.yaml, which lists them or maps their numbers to them."""
    names = content["names"]
    if isinstance(names, dict):
        names = [names.get(str(number)) for number in range(len(names))]
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise DataError(f"{file}: names must list the classes, or map the numbers from 0 to them")
    given = content.get("nc", str(len(names)))
    if given != str(len(names)):
        shown = printable(given) if isinstance(given, str) else "no number"
        raise DataError(
            f"{file}: nc is {shown:.20}, but names has "
            f"{plural(len(names), 'class', 'classes')}: correct nc or names"
        )
    return names


def resolve(root: Path, folders: Sequence[Path], entry: str) -> Path | None:
    """Return the path below `root` that a data.yaml means, None if there is none.

    folders: those to which the path may be relative. As in Ultralytics, a leading ../ of a path
    that does not exist is left out, because Roboflow writes one too many.
    """
    inside = os.path.join(os.path.abspath(root), "")
    inner = re.sub(r"^(\.\./)+", "", entry)
    for path in [*(Path(folder, entry) for folder in folders), root / inner]:
        absolute = os.path.join(os.path.abspath(path), "")
        if absolute.startswith(inside) and os.path.exists(path):
            return root / os.path.relpath(path, root)
    return None


def read_yolo(root: Path, location: tuple, roots: Roots) -> Files:
    classes, yaml_file, has_keypoints, paths = location
    names = []
    for path in paths:
        check_inside(root, path, yaml_file, roots)
        names += images_below(root, path) if path.is_dir() else listed_images(root, path)
    if not names:
        raise DataError(f"{paths[0]} has no images ({' '.join(EXTENSIONS)}): check {yaml_file}")
    converted, num_labeled = Converted(root, classes), 0
    for name in names:
        file = check_inside(root, root / label_path(name), yaml_file, roots)
        lines = read_lines(file, MAX_LABELS) if file.exists() else []
        num_labeled += file.exists()
        size = converted.add_image(name)
        for number, line in enumerate(lines, 1):
            if size and line.strip():
                where = f"{file}, line {number}"
                label, points = parse_label(line, len(classes), where, boxes_only=has_keypoints)
                row = yolo_row(points, size)
                converted.add_row(label, id=f"{label_path(name)}, line {number}", **row)
    if has_keypoints:
        converted.notes.append(
            f"{yaml_file} has kpt_shape: the keypoints of its labels are not used"
        )
    if not num_labeled:
        images = plural(len(names), "image")
        raise DataError(
            f"none of the {images} of {paths[0]} has a file of labels, such as "
            f"{root / label_path(names[0])}: add them"
        )
    if all(path.is_dir() for path in paths) and (unused := unused_labels(root, names)):
        files = plural(len(unused), "file of labels has", "files of labels have")
        converted.notes.append(
            f"{root}: {files} no image, such as {printable(unused[0])}: add the images, or remove "
            "these files"
        )
    return root, converted.to_source(paths[0])


def images_below(root: Path, folder: Path) -> list[str]:
    """Return the sorted paths of the images in a folder and its subfolders, relative to `root`."""
    files = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    paths = (os.path.relpath(file, root) for file in files if is_image(os.path.basename(file)))
    return sorted(paths)


def listed_images(root: Path, file: Path) -> list[str]:
    """Return the paths of the images that a text file lists, one per line, relative to `root`."""
    lines = [line.strip() for line in read_lines(file, MAX_LIST)]
    found = [(line, resolve(root, [file.parent, root], line)) for line in lines if line]
    if missing := [line for line, path in found if path is None]:
        images = plural(len(missing), "image that is", "images that are")
        raise DataError(
            f"{file} names {images} not in {root}, such as "
            f"{printable(missing[0])}: add them, or remove their lines"
        )
    return [os.path.relpath(path, root) for _, path in found]


def unused_labels(root: Path, names: Sequence[str]) -> list[str]:
    """Return the paths of the files of labels without an image. names: paths of the images."""
    used = {label_path(name) for name in names}
    folders = {os.path.dirname(path) for path in used}
    return sorted(
        path
        for folder in folders
        if "labels" in Path(folder).parts and (root / folder).is_dir()
        for path in (os.path.join(folder, file) for file in os.listdir(root / folder))
        if path.endswith(".txt") and path not in used and not path.endswith("classes.txt")
    )


def label_path(name: str) -> str:
    """Return the path of the labels of an image: labels/ in place of the last images/, .txt."""
    path = Path(name)
    folders = list(path.parts[:-1])
    if "images" in folders:
        folders[len(folders) - 1 - folders[::-1].index("images")] = "labels"
    return str(Path(*folders, f"{path.stem}.txt"))


def parse_label(
    line: str, num_classes: int, where: str, *, boxes_only: bool = False
) -> tuple[int, np.ndarray]:
    """Parse a line of labels. Returns (number of the class, points (n, 2) in fractions), where two
    points are the center and the size of a box, and more are a polygon. boxes_only: ignore what
    follows a box, such as keypoints."""
    try:
        number, *values = map(float, line.split()[: 5 if boxes_only else None])
    except ValueError:
        raise DataError(
            f"{where}: {printable(line.strip())!r:.60} is no label; {YOLO_LINE}"
        ) from None
    if len(values) < 4 or len(values) % 2:
        raise DataError(f"{where} has {len(values) + 1} numbers; {YOLO_LINE}")
    if not 0 <= number < num_classes or number != int(number):
        raise DataError(
            f"{where}: class {number:g} is not one of the {num_classes} names in data.yaml, which "
            "are numbered from 0: correct the line, or add the name"
        )
    return int(number), np.array(values).reshape(-1, 2)


@np.errstate(all="ignore")  # numbers may be infinite: such boxes are dropped and counted
def yolo_row(points: np.ndarray, size: tuple[int, int]) -> dict[str, Any]:
    """Convert points, see `parse_label`, in an image of `size` to fields of a COCO annotation."""
    points = points * size
    if len(points) == 2:
        center, sides = points
        return {"bbox": [*(center - sides / 2).tolist(), *sides.tolist()]}
    low, (x, y) = points.min(axis=0), points.T
    bbox = [*low.tolist(), *(points.max(axis=0) - low).tolist()]
    area = abs(float(x @ np.roll(y, 1) - y @ np.roll(x, 1))) / 2
    return {"bbox": bbox, "area": area, "segmentation": [points.ravel().tolist()]}


# ---- Pascal VOC


def find_voc(root: Path, roots: Roots) -> dict[str, tuple]:
    """Return {split: (folder of XML files, image folder, list of their names or None for all,
    folders of the XML files of all splits)}."""
    folder = next((root / name for name in VOC_FOLDERS if has_xml(root / name)), None)
    if folder is None:
        beside = {split: [root / name for name in names] for split, names in SPLIT_NAMES.items()}
        found = {split: next(filter(has_xml, paths), None) for split, paths in beside.items()}
        folders = sorted({path for path in found.values() if path})
        splits = {split: (path, path, None, folders) for split, path in found.items() if path}
        return splits or ({"train": (root, root, None, [root])} if has_xml(root) else {})
    images = next((root / name for name in VOC_IMAGES if (root / name).is_dir()), folder)
    lists = root / "ImageSets/Main"
    splits = {
        split: (folder, images, lists / f"{name}.txt", [folder])
        for split, names in SPLIT_NAMES.items()
        for name in reversed(names)
        if (lists / f"{name}.txt").is_file()
    }
    return splits or {"train": (folder, images, None, [folder])}


def has_xml(folder: Path) -> bool:
    return folder.is_dir() and any(map(is_xml, os.listdir(folder)))


def is_xml(name: str) -> bool:
    return name.endswith(".xml") and not name.startswith(".")


def read_voc(root: Path, location: tuple, roots: Roots) -> Files:
    """Read a split in the layout of Pascal VOC. Objects that are marked as difficult become crowds,
    so they are left out of training, and evaluation ignores them."""
    folder, images, names, folders = location
    for path in (folder, images, *([names] if names else ())):
        check_inside(root, path, "the dataset", roots)
    if names is None:
        stems = sorted(name.removesuffix(".xml") for name in os.listdir(folder) if is_xml(name))
    else:
        stems = [line.strip() for line in read_lines(names, MAX_LIST) if line.strip()]
    files = {}  # {stem: name of the image}
    for entry in sorted(os.listdir(images)):
        if is_image(entry):
            files.setdefault(Path(entry).stem, entry)
    known, found = set(files.values()), []
    for stem in stems:
        file = check_inside(root, folder / f"{stem}.xml", names or "the dataset", roots)
        element = parse_xml(file)
        given = Path(element.findtext("filename") or "").name
        same = [given] if Path(given).stem == stem and given in known else []
        image = same[0] if same else files.get(stem) or given or f"{stem}.jpg"
        objects = [
            parse_object(each, file, i) for i, each in enumerate(element.findall("object"), 1)
        ]
        found.append((image, parse_size(element), objects))
    classes = list_classes((name for _, _, objects in found for name, *_ in objects), folder)
    converted, labels = Converted(root, classes), {name: i for i, name in enumerate(classes)}
    shift, note = first_pixel(read_corners(root, folders, roots))
    converted.notes += [f"{names or folder}: {note}"] if note else []
    for stem, (image, size, objects) in zip(stems, found):
        converted.add_image(os.path.relpath(images / image, root), size)
        for number, (name, (x1, y1, x2, y2), is_difficult) in enumerate(objects, 1):
            bbox = [x1 - shift, y1 - shift, x2 - x1 + shift, y2 - y1 + shift]
            where = f"{folder.name}/{stem}.xml, object {number}"
            label = labels[normalize_name(name)]
            converted.add_row(label, id=where, bbox=bbox, iscrowd=int(is_difficult))
    return root, converted.to_source(names or folder)


def parse_xml(file: Path) -> Element:
    """Parse an XML file. A document type, which could define entities that grow or read files, is
    refused."""

    def refuse(name: str, *_: Any) -> None:
        raise DataError(f"{file} has a document type (<!DOCTYPE {printable(name)}>): remove it")

    builder, parser = TreeBuilder(), expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = builder.data, refuse
    try:
        parser.Parse(read_small(file, MAX_XML), True)
    except (expat.ExpatError, LookupError, ValueError) as error:
        raise DataError(f"{file} is not valid XML: {error}: write this file again") from error
    return builder.close()


def parse_size(element: Element) -> tuple[int, int] | None:
    """Return the (width, height) of the image in an XML file, None if it has no valid size."""
    try:
        size = [int(float(element.findtext(f"size/{side}") or 0)) for side in ("width", "height")]
    except (ValueError, OverflowError):
        return None
    return tuple(size) if 0 < min(size) <= max(size) < 1 << 31 else None


def parse_object(element: Element, file: Path, number: int) -> tuple[str, list[float], bool]:
    """Return (class name, xmin ymin xmax ymax, whether it is difficult) of an object in a file."""
    name = " ".join((element.findtext("name") or "").split())
    try:
        box = [float(element.findtext(f"bndbox/{corner}") or "") for corner in CORNERS]
    except ValueError:
        box = []
    if not (name and box):
        lacking = "no name" if box else f"no bndbox with the numbers {' '.join(CORNERS)}"
        raise DataError(f"{file}: object {number} has {lacking}: correct or remove it")
    return name, box, (element.findtext("difficult") or "").strip() == "1"


def read_corners(root: Path, folders: Sequence[Path], roots: Roots) -> np.ndarray:
    """Return xmin ymin xmax ymax of all objects in folders of XML files, (n, 4). Files that are
    invalid are left out, because they may belong to no split."""
    boxes = []
    for path in (path for folder in folders for path in sorted(folder.rglob("*.xml"))):
        with suppress(DataError):
            objects = parse_xml(check_inside(root, path, "the dataset", roots)).findall("object")
            boxes += [parse_object(each, path, i)[1] for i, each in enumerate(objects, 1)]
    return np.array(boxes).reshape(-1, 4)


def first_pixel(corners: np.ndarray) -> tuple[int, str]:
    """Return the number of the first pixel in boxes of Pascal VOC, 1 or 0, and a note, which may be
    empty.

    In Pascal VOC, and so in detectron2, pixels count from 1 and xmax is the last pixel of the box.
    CVAT and others write edges that count from 0. They are recognized by fractions, or by boxes
    that begin at 0, if not many more begin at 1: a single 0 may be a slip. corners (n, 4): the
    boxes of all splits, so that all of them are read in the same way.
    """
    with np.errstate(invalid="ignore"):
        has_fractions = (corners != corners.round()).any(axis=1)
    zeros, ones = (int((corners[:, :2] == first).any(axis=1).sum()) for first in (0, 1))
    if 2 * has_fractions.sum() > len(corners) or (zeros and 2 * zeros >= ones):
        return 0, (
            "boxes begin at 0 or have fractions, so they are read as edges that count from 0, not "
            "as pixels that count from 1"
        )
    counts = f"{zeros} of {plural(len(corners), 'box', 'boxes')} begin at 0, but {ones} at 1"
    return 1, f"{counts}, so they are read as pixels that count from 1" if zeros else ""


# ---- common to all


class Converted:
    """Annotations that are converted to COCO's format, image by image.

    root: folder of the images. classes: names of the classes.
    """

    def __init__(self, root: Path, classes: Iterable[str]):
        self.root, self.unreadable, self.notes = root, [], []
        self.categories = [{"id": i, "name": name} for i, name in enumerate(classes, 1)]
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def add_image(self, name: str, size: tuple[int, int] | None = None) -> tuple[int, int] | None:
        """Add an image and return its (width, height), None if it is unreadable.

        name: path relative to the root. size: None to read it from the image.
        """
        path = self.root / name
        if size is None and os.path.exists(path):
            try:
                size = read_size(path)
            except UnreadableImage:
                self.unreadable.append(name)
        width, height = size or (1, 1)
        image = dict(id=len(self.images) + 1, file_name=name, width=width, height=height)
        self.images.append(image)
        return size

    def add_row(self, label: int, **fields: Any) -> None:
        """Add an annotation of the last image. label: number of the class, from 0."""
        image_id = self.images[-1]["id"]
        self.annotations.append(dict(image_id=image_id, category_id=label + 1, **fields))

    def to_source(self, path: Path) -> AnnotationSource:
        """Return the annotations. path: file or folder they are from, for messages."""
        if self.unreadable:
            self.notes.append(
                f"{path}: the labels of {plural(len(self.unreadable), 'image')} are not used, "
                "because the size cannot be read, such as "
                f"{printable(self.unreadable[0])}: repair or remove them"
            )
        names = ("images", "annotations", "categories")
        text = json.dumps({name: getattr(self, name) for name in names})
        return AnnotationSource(path, text, by_name=True, notes=self.notes)


def check_inside(root: Path, path: Path, named_by: object, roots: Roots) -> Path:
    """Return `path`, which begins with `root`. Raises DataError if it is outside of `root` and of
    the folders `roots`, with all links followed. named_by: what has the path, for the message."""
    return path_below(root, os.path.relpath(path, root), named_by, roots)


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def read_small(file: Path, limit: int) -> bytes:
    """Read a file. Raises DataError if it cannot be read or has more than `limit` bytes."""
    try:
        with regular_file(file).open("rb") as opened:
            content = opened.read(limit + 1)
    except FileNotFoundError as error:
        raise DataError(f"there is no file {file}: add it, or remove its name") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    if len(content) > limit:
        raise DataError(f"{file} has more than {limit >> 10:,} KiB, the limit of such a file")
    return content


def read_lines(file: Path, limit: int) -> list[str]:
    """Read the lines of a text file. Raises DataError if it is not text, see also `read_small`."""
    content = read_small(file, limit)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not a text file in UTF-8: {error}") from error
    if "\0" in text:
        raise DataError(f"{file} is not a text file: write this file again")
    return text.split("\n")


LAYOUTS = {
    "COCO": Layout(
        "train/_annotations.coco.json, annotations/instances_train.json or train.json",
        find_coco,
        read_coco,
    ),
    "YOLO": Layout("data.yaml with names, train and val", find_yolo, read_yolo),
    "Pascal VOC": Layout(
        "Annotations/*.xml with JPEGImages/ and ImageSets/Main/train.txt, or train/*.xml",
        find_voc,
        read_voc,
    ),
}
