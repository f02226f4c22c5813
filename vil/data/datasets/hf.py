"""Images in a folder that the Hugging Face library `datasets` wrote with `save_to_disk`.

The same library reads the files, because their format depends on its version. Forked workers share
the memory-mapped files, and spawned workers open them again.
"""

import io
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vil.data import EXTRAS
from vil.data.bands import BandImage
from vil.data.dataset import ImageDataset, Root, Transform
from vil.data.datasets.table_labels import Location, read_lists, read_weights
from vil.data.image import UnreadableImage
from vil.data.splits import number_keys
from vil.utils.errors import DataError, StoppedError
from vil.utils.extras import require_extra
from vil.utils.lookup import lookup
from vil.utils.safe_files import path_below, regular_file, unicode_hint

NAMES = {"train": ("train",), "val": ("validation", "val"), "test": ("test",)}
# Types of columns that can contain the targets. The second tuple is used only if no column has a
# type in the first tuple.
LABEL_TYPES = {
    "class": (("ClassLabel",), ("string", "integer")),
    "labels": (("list of ClassLabel",), ("list of string", "list of integer")),
    "numbers": (("float", "list of float"), ("integer", "list of integer")),
}
# if several columns fit, the column with one of these names is used
USUAL = ("label", "labels")


class HuggingFace(ImageDataset):
    """A dataset of the rows of a Hugging Face `Dataset` or `DatasetDict` that `save_to_disk` wrote.
    All rows of a `Dataset` are training images. The splits of a `DatasetDict` are train, validation
    (or val) and test."""

    splits = ("train", "val", "test")

    def __init__(
        self,
        root: Root,
        split: str,
        transform: Transform = None,
        *,
        folder: str = ".",
        image_column: str | None = None,
        label_column: str | None = None,
        group_column: str | None = None,
        weight_column: str | None = None,
        text_labels: bool = False,
        all_rows: bool = False,
        target_type: str = "class",
        extra_roots: Sequence[str] = (),
        channels: int = 3,
    ):
        """Open a split of the saved dataset in root/folder, and read its labels, split groups and
        sample weights.

        Args:
            image_column: by default, the only column of type Image.
            label_column: by default, the column with a type in the first tuple of
                LABEL_TYPES[target_type] or, if there is none, in the second tuple. If several
                columns fit, the one called label or labels is used. A ClassLabel column has one
                class per name, including names without images.
            group_column, weight_column: columns with the values of `split_groups` and `weights`,
                see `ImageDataset`. Default: none.
            text_labels: accept any text as a class name, including a mix of numbers and words.
            all_rows: if the dataset has no splits, use all rows in every split.
            target_type: see `ImageDataset`.
            extra_roots: folders, besides root, that may contain the dataset. Images that the
                dataset stores by path must be in one of extra_roots or in its own folder.
            channels: see `read_image`.

        Raises DataError if the folder or its labels are invalid, a default column is missing or
        ambiguous, or image files are missing. Raises ValueError if a column given by its name does
        not exist.
        """
        super().__init__(split, transform)
        self.target_type, self.channels = target_type, channels
        self.folder = path_below(root, folder, "the config", extra_roots)
        loaded = load(self.folder)
        name = select_split(self.folder, loaded, split, all_rows)
        self.prefix = name or self.folder.resolve().name
        rows = loaded[name]
        self.column = find_column(self.folder, rows.features, "image", image_column, [("Image",)])
        label = find_column(
            self.folder, rows.features, "label", label_column, LABEL_TYPES[target_type]
        )
        other = loaded.get("train") if split != "train" else None  # it defines the classes
        parts = [rows] if other is None else [other, rows]
        names = ["train"] * (len(parts) - 1) + [self.prefix]
        lines = [f"{n}[{row}]" for n, part in zip(names, parts) for row in range(len(part))]
        is_own = np.arange(len(lines)) >= len(lines) - len(rows)
        where = Location(self.folder, "row", lines)
        for part in parts:
            lookup(part.features, label, f"column of the split train in {self.folder}")
        self.classes, targets = read_lists(
            [texts for part in parts for texts in read_texts(part, label)],
            target_type,
            where,
            ~is_own if other is not None else is_own,
            text_labels=text_labels,
            name=label,
            classes=class_names(parts[0].features[label]),
        )
        self.targets = targets[is_own]
        where = where._replace(lines=lines[-len(rows) :])
        if group_column:
            texts = self._read_column(rows, group_column)
            self.split_groups = number_keys([text or None for text in texts])
        if weight_column:
            self.weights = read_weights(self._read_column(rows, weight_column), where)
        self.rows = undecoded(rows, self.column)
        self._check_images(where, extra_roots)

    def _read_column(self, rows: Any, name: str) -> list[str]:
        lookup(rows.features, name, f"column of {self.folder}")
        return [",".join(texts) for texts in read_texts(rows, name)]

    def _check_images(self, where: Location, extra_roots: Sequence[Root]) -> None:
        """Raise DataError if a row has neither the bytes nor the path of an image, or if the path
        is not a file below the dataset's folder or one of extra_roots. Does not read the images."""
        from pyarrow import compute

        cells = self.rows.data.column(self.column)
        # pyrefly: ignore[missing-attribute]  # pyarrow generates the functions of this module
        inline = np.array(compute.is_valid(compute.struct_field(cells, "bytes")))
        names = np.full(len(inline), "", object)
        # pyrefly: ignore[missing-attribute]
        paths = compute.struct_field(cells, "path").filter(compute.invert(inline))
        names[~inline] = [path or "" for path in paths.to_pylist()]
        where.refuse(~inline & (names == ""), "have no image", names)
        missing = ~inline
        for row in np.flatnonzero(~inline).tolist():
            path = path_below(self.folder, names[row], where.lines[row], extra_roots)
            missing[row] = not path.is_file()
        hint = unicode_hint(self.folder, names[missing.argmax()]) if missing.any() else ""
        problem = f"name an image that does not exist below {self.folder}{hint}"
        where.refuse(missing, problem, names)

    def content(self, index: int) -> bytes:
        try:
            cell = self.rows[int(index)][self.column]
        except StoppedError:  # a signal in the main process
            raise
        except Exception as error:  # pyarrow has no common type for corrupt data
            raise UnreadableImage(f"{type(error).__name__}: {error}") from error
        if cell["bytes"] is not None:
            return cell["bytes"]
        return regular_file(self.folder / cell["path"]).read_bytes()

    def image(self, index: int) -> Image.Image | BandImage:
        return self.read(io.BytesIO(self.content(index)))

    def sample_name(self, index: int) -> str:
        """Return <split>[<row>], such as train[7]."""
        return f"{self.prefix}[{index}]"


def load(folder: Path) -> Mapping[str, Any]:
    """Open a folder that `save_to_disk` wrote.

    Returns {split: datasets.Dataset}. A saved `Dataset`, which has no splits, is returned under the
    name "". Raises DataError if `datasets` is not installed or cannot read the folder.
    """
    require_extra(EXTRAS["hf"], f"the dataset {folder}")
    files = [folder / name for name in ("dataset_dict.json", "state.json")]
    if not any(file.is_file() for file in files):
        raise DataError(
            f"{folder} was not written by Dataset.save_to_disk (Hugging Face datasets): it has no "
            f"{' or '.join(file.name for file in files)}"
        )
    from datasets import Dataset, load_from_disk

    try:
        for file in find_arrow_files(folder):
            check_arrow_file(file)
        loaded = load_from_disk(str(folder))
    except DataError:
        raise
    except Exception as error:  # of pyarrow, json or the library, for files with any content
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{folder} cannot be read: {reason}") from error
    loaded = {"": loaded} if isinstance(loaded, Dataset) else loaded
    return {str(name): rows.with_format(None) for name, rows in loaded.items()}


def find_arrow_files(folder: Path) -> list[Path]:
    """List the Arrow files of a saved dataset, which the library opens wherever they are.

    Raises DataError if a JSON file of the dataset names a path that is not below the folder, or one
    path twice, which multiplies its rows. Raises OSError for a path that is not a regular file.
    """
    folder = Path(os.path.abspath(folder))  # so that the paths below it are not joined to it again
    parts, files = [folder], []
    if (file := folder / "dataset_dict.json").is_file():
        splits = _read_json(folder, file)["splits"]
        parts += [path_below(folder, name, file) for name in splits]
    for part in parts:
        if (file := part / "state.json").is_file():
            names = [entry["filename"] for entry in _read_json(folder, file)["_data_files"]]
            files += [regular_file(path_below(folder, part / name, file)) for name in names]
    real = [os.path.realpath(file) for file in files]
    if repeated := next((path for path in real if real.count(path) > 1), None):
        raise DataError(f"{folder} names {repeated} more than once: each file has its own rows")
    return files


def _read_json(folder: Path, file: Path) -> Any:
    return json.loads(path_below(folder, file, folder).read_text("utf-8"))


def check_arrow_file(file: Path) -> None:
    """Check that all values of an Arrow file are within its bytes, because pyarrow would otherwise
    read beyond them. Raises ArrowException if they are not, and DataError for a file that has more
    rows than bytes, or compressed values, which may take any amount of memory. Does not read the
    images."""
    import pyarrow.ipc

    rows, size = 0, file.stat().st_size
    with pyarrow.memory_map(str(file)) as source:
        for message in pyarrow.ipc.MessageReader.open_stream(source):
            if is_compressed(message.type, message.metadata.to_pybytes()):
                raise DataError(f"{file} is compressed: save it again with save_to_disk")
        source.seek(0)
        for batch in pyarrow.ipc.open_stream(source):
            rows += batch.num_rows
            if rows > size:
                raise DataError(f"{file} has {size} bytes, but more than {rows - 1} rows")
            batch.validate(full=True)


def is_compressed(kind: str, metadata: bytes) -> bool:
    """Return whether an Arrow message has compressed values, which pyarrow cannot tell before it
    expands them.

    kind: type of the message, as in pyarrow. metadata: a flatbuffer of the type Message in Arrow's
    format/Message.fbs. In a flatbuffer, a table has at its start the distance to a list of the
    offsets of its fields, which is 0 for a missing field.
    """

    def number(form: str, place: int) -> int:
        return struct.unpack_from(form, metadata, place)[0]

    def field(table: int, index: int) -> int:
        offsets, entry = table - number("<i", table), 4 + 2 * index
        offset = number("<H", offsets + entry) if entry < number("<H", offsets) else 0
        return table + offset if offset else 0

    def follow(place: int) -> int:
        return place + number("<I", place)

    if kind not in ("record batch", "dictionary"):
        return False
    batch = follow(field(follow(0), 2))  # Message.header
    if kind == "dictionary":
        batch = follow(field(batch, 1))  # DictionaryBatch.data
    return field(batch, 3) > 0  # RecordBatch.compression


def select_split(folder: Path, loaded: Mapping[str, Any], split: str, all_rows: bool) -> str:
    """Return the key under which `loaded` has the split "train", "val" or "test".

    loaded: {key: dataset}, the result of `load`. all_rows: if the dataset has no splits (its only
    key is ""), use all rows for every split. Raises DataError if the split is missing or empty.
    """
    names = [name for name in NAMES[split] if name in loaded]
    if "" in loaded and (split == "train" or all_rows):
        names = [""]
    hint = "" if split == "train" else f": set DATA.{split.upper()}_FRACTION to 0.2"
    if not names and "" in loaded:
        problem = f"has no split {split}: it has no splits, so all rows are training images"
        raise DataError(f"{folder} {problem}{hint}")
    if not names:
        problem = f"has no split {' or '.join(NAMES[split])}, only {', '.join(loaded)}"
        raise DataError(f"{folder} {problem}{hint}")
    if not len(loaded[names[0]]):
        raise DataError(f"{folder / names[0]} has no rows")
    return names[0]


def find_column(
    folder: Path,
    features: Mapping[str, Any],
    noun: str,
    given: str | None,
    types: Sequence[Sequence[str]],
) -> str:
    """Return the name of the image or label column.

    features: {column: its feature type}. noun: "image" or "label". given: the column that the user
    set, or None to find it by its type. types: lists of allowed types, the preferred list first.

    Raises ValueError if the column `given` does not exist. Raises DataError if its type is not
    allowed, or if no column or several columns fit.
    """
    columns = {name: type_of(feature) for name, feature in features.items()}
    known = [name for names in types for name in names]
    key = f"DATA.KWARGS.{noun}_column"
    if given:
        if (found := lookup(columns, given, f"column of {folder}")) not in known:
            raise DataError(f"{folder}: {key} {given} has type {found}, not {' or '.join(known)}")
        return given
    for names in types:
        fits = [name for name, kind in columns.items() if kind in names]
        usual = [name for name in fits if noun == "label" and name in USUAL]
        if len(fits) == 1 or len(usual) == 1:
            return (fits if len(fits) == 1 else usual)[0]
        if fits:
            raise DataError(
                f"{folder} has several columns of type {' or '.join(names)}: "
                f"set {key} to one of {', '.join(fits)}"
            )
    shown = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
    raise DataError(f"{folder} has no column of type {' or '.join(known)} for {key}, only {shown}")


def type_of(feature: Any) -> str:
    """Return the name of a column's type, such as "Image", "ClassLabel" or "list of float"."""
    if (item := getattr(feature, "feature", None)) is not None:
        return f"list of {type_of(item)}"
    if (name := type(feature).__name__) != "Value":
        return name
    kinds = {"float": "float", "int": "integer", "uint": "integer", "large_string": "string"}
    text = feature.dtype.rstrip("0123456789")
    return kinds.get(text, text)


def class_names(feature: Any) -> list[str]:
    """Return the class names of a column of type ClassLabel or list of ClassLabel. Returns [] for
    any other type."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return [str(name).strip() for name in names or ()]


def read_texts(rows: Any, column: str) -> list[list[str]]:
    """Return the values of a column as one list of texts per row. Missing values, missing lists,
    and negative numbers in a ClassLabel column, become ""."""
    names, is_list = class_names(rows.features[column]), hasattr(rows.features[column], "feature")

    def text(value: Any) -> str:
        if value is None or (names and value < 0):
            return ""
        return names[value] if names and value < len(names) else str(value)

    return [
        [text(v) for v in (value if is_list and value is not None else [value])]
        for value in rows[column][:]
    ]


def undecoded(rows: Any, column: str) -> Any:
    """Return a dataset with only the image column, whose images are not decoded. Each image is a
    dict {"bytes": ..., "path": ...}."""
    from datasets import Image as ImageType

    return rows.select_columns([column]).cast_column(column, ImageType(decode=False))
