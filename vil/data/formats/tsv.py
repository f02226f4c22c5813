"""Datasets of base64 images in the rows of a .tsv, described by a .yaml with these keys:

img: train.tsv           # key TAB [label TAB ...] image; required, all others are optional
label: train.label.tsv   # key TAB label; default: the label is the second column of img
hw: train.hw.tsv         # key TAB ...; only the keys are used, as sample names
linelist: train.linelist # row numbers from 0, which may repeat; default: all rows
labelmap: labelmap.txt   # name [TAB class number] per line; default: the line number, from 0

The large datasets of the original 2021 code have this format. Paths are absolute or relative to the
yaml. With all links resolved, they must lie below the root of the dataset, the folder of the yaml
or one of `extra_roots`.
"""

import binascii
import io
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml as yaml_format
from PIL import Image

from vil.data.bands import BandImage
from vil.data.classes import normalize_name, parse_class
from vil.data.dataset import ImageDataset, Root, Transform
from vil.data.formats.tsv_file import TsvFile, read_integers
from vil.data.image import UnreadableImage
from vil.utils.errors import DataError
from vil.utils.safe_files import join_roots, path_below, regular_file

logger = logging.getLogger(__name__)

KEYS = ("img", "label", "hw", "linelist", "labelmap")
# if the name of the yaml contains this text, a label is a JSON list of objects {"class": ...}
JSON_LABELS = "imagenet_22k"


class Tsv(ImageDataset):
    """A dataset of images in TSV files, which are listed in root/{split}.yaml or another yaml file.

    A linelist (file of row numbers) selects and orders the samples. Labels are integers or, with a
    labelmap (file of class names), also names.
    """

    splits = ("train", "val", "test")

    def __init__(
        self,
        root: Root,
        split: str,
        transform: Transform = None,
        *,
        yaml: str | None = None,
        num_classes: int | None = None,
        extra_roots: Sequence[str] = (),
        channels: int = 3,
    ):
        """Read the yaml, the labels and the positions of the rows.

        yaml: path of the yaml below root; default: {split}.yaml. extra_roots: folders, besides
        root, that may contain the files. channels: see `read_image`.

        If num_classes is None, the first of these that exists determines it:
        1. the labelmap (file of class names),
        2. the dataset of train.yaml, which is used only if `yaml` is None,
        3. the largest label of this split, plus 1.

        Raises DataError for missing or inconsistent files and invalid labels. Raises ValueError if
        num_classes differs from the labelmap.
        """
        super().__init__(split, transform)
        self.channels = channels
        source = Path(root, yaml or f"{split}.yaml")
        files = read_yaml(source, join_roots(root, extra_roots))
        self.images, labels, self.keys = open_files(files)
        as_json = JSON_LABELS in (yaml or source.name)
        if as_json and labels is not self.images:
            raise DataError(
                f"{source}: a dataset with {JSON_LABELS} in its path has its labels in the file of "
                "the key 'img': remove the key 'label'"
            )
        self.rows = read_rows(files.get("linelist"), len(self.images))
        labelmap = read_labelmap(files["labelmap"]) if "labelmap" in files else {}
        if labelmap:
            size = max(labelmap.values()) + 1
            if num_classes not in (None, size):
                text = f"num_classes is {num_classes}, but the labelmap has {size} classes"
                raise ValueError(text)
            num_classes = size
        by_split = yaml is None and split != "train"
        if num_classes is None and by_split and Path(root, "train.yaml").exists():
            num_classes = len(Tsv(root, "train", extra_roots=extra_roots).classes)
        texts = labels.labels(self.rows, before_image=labels is self.images)
        if as_json:
            texts = json_classes(texts, labels.path, self.rows)
        expected = "a name of the labelmap or an integer" if labelmap else "an integer"
        self.targets = np.empty(len(self.rows), np.int64)
        for sample, (row, text) in enumerate(zip(self.rows, texts)):
            number = labelmap.get(normalize_name(text))
            if number is None:
                number = parse_class(text, num_classes, labels.path, row + 1, expected)
            self.targets[sample] = number
        names = {number: name for name, number in labelmap.items()}
        num_classes = int(self.targets.max()) + 1 if num_classes is None else num_classes
        self.classes = [names.get(number, str(number)) for number in range(num_classes)]

    def content(self, index: int) -> bytes:
        """Return the bytes of the image file."""
        text = self.images.row(self.rows[index]).rsplit(b"\t", 1)[-1]
        try:
            return binascii.a2b_base64(text, strict_mode=True)
        except binascii.Error as error:
            raise UnreadableImage(f"not base64: {error}") from error

    def image(self, index: int) -> Image.Image | BandImage:
        return self.read(io.BytesIO(self.content(index)))

    def sample_name(self, index: int) -> str:
        """Return the first column of the sample's row. If the row cannot be read, returns its file
        and line number instead."""
        row = int(self.rows[index])
        try:
            return self.keys.key(row)
        except OSError:
            return f"{self.keys.path}, line {row + 1}"


def read_yaml(source: Path, roots: Sequence[Root] = ()) -> dict[str, Path]:
    """Return the files that the yaml `source` lists, as {key: path}.

    Each file must lie below the folder of the yaml or one of the `roots`. Raises DataError if a
    file is missing or lies elsewhere, or if the yaml is invalid.
    """
    try:
        tree = yaml_format.safe_load(regular_file(source).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        text = f"there is no {source}, which must list the files of the TSV dataset"
        raise DataError(text) from error
    except (yaml_format.YAMLError, OSError, ValueError, RecursionError) as error:
        raise DataError(f"{source} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict) or tree.get("img") is None:
        raise DataError(f"{source} must have the key 'img' (and may have {', '.join(KEYS[1:])})")
    if unknown := [str(key) for key in tree if key not in KEYS]:
        logger.warning("%s has unknown keys, which are ignored: %s", source, ", ".join(unknown))
    files = {key: tree[key] for key in KEYS if tree.get(key) is not None}
    if invalid := [key for key in files if not isinstance(files[key], str)]:
        raise DataError(f"{source}: {invalid[0]} must be the path of a file")
    files = {key: path_below(source.parent, path, source, roots) for key, path in files.items()}
    if missing := [path for path in files.values() if not path.is_file()]:
        raise DataError(f"{source} names a file that does not exist: {missing[0]}")
    return files


def open_files(files: dict[str, Path]) -> tuple[TsvFile, TsvFile, TsvFile]:
    """Open the .tsv files of a dataset: images, labels and sample names, in this order.

    Some of them may be the same file. files: as returned by `read_yaml`. Raises DataError if the
    numbers of rows differ.
    """
    images = TsvFile(files["img"])
    labels = TsvFile(files["label"]) if "label" in files else images
    keys = TsvFile(files["hw"]) if "hw" in files else labels
    for other in (labels, keys):
        if len(other) != len(images):
            counts = f"{len(other)} rows, but {images.path} has {len(images)}"
            raise DataError(f"{other.path} has {counts}")
    return images, labels, keys


def read_rows(linelist: Path | None, count: int) -> np.ndarray:
    """Return the row number of each sample (N,), read from a linelist. If linelist is None, return
    all row numbers 0..count-1. Raises DataError if the linelist is empty or has a row that does not
    exist."""
    if linelist is None:
        return np.arange(count)
    rows = read_integers(linelist)
    for line in np.flatnonzero((rows < 0) | (rows >= count))[:1]:
        problem = f"row {rows[line]} is outside 0..{count - 1}"
        raise DataError(f"{linelist}, line {line + 1}: {problem}")
    if not len(rows):
        raise DataError(f"{linelist} is empty")
    return rows


def read_labelmap(file: Path) -> dict[str, int]:
    """Read a labelmap as {name: class number}, with names in the form of `normalize_name`. Raises
    DataError for an invalid or repeated entry."""
    labelmap, numbers = {}, set()
    text = file.read_text(encoding="utf-8-sig", errors="surrogateescape").rstrip("\n")
    for line, row in enumerate(text.split("\n"), start=1):
        name, _, number = row.rstrip("\r").partition("\t")
        name = normalize_name(name)
        number = parse_class(number or str(line - 1), None, file, line)
        if not name or name in labelmap or number in numbers:
            problem = "the name is empty, or the name or the number was used before (names in two "
            problem += "Unicode forms are one name)"
            raise DataError(f"{file}, line {line}: {problem}")
        labelmap[name] = number
        numbers.add(number)
    return labelmap


def json_classes(texts: Iterable[str], file: Path, rows: np.ndarray) -> Iterator[str]:
    """Parse JSON labels such as [{"class": "cat"}, ...]. Yields the "class" of the first element of
    each label.

    Raises DataError for an invalid label. file, rows: the file and the row number of each label,
    for the error message.
    """
    for row, text in zip(rows, texts):
        try:
            yield str(json.loads(text)[0]["class"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise DataError(
                f"{file}, line {row + 1}: the label must be a JSON list whose first element has a "
                f"'class', got {text[:100]!r}"
            ) from error
