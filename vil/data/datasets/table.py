"""Images listed in a CSV, TSV or Parquet file with one row per image, for example:

path,label,split,group,weight
photos/1.jpg,cat,train,house 1,1
photos/2.jpg,dog,val,house 2,0.5

Only the first two columns are required.

Shapes: N images of a split, K labels or numbers per image.
"""

import logging
import os
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from vil.data.bands import BandImage
from vil.data.dataset import SPLITS, ImageDataset, Root, Transform
from vil.data.datasets.table_labels import Location, read_targets, read_weights, refuse_lists
from vil.data.formats.table_file import read_rows
from vil.data.splits import number_keys
from vil.utils.errors import DataError
from vil.utils.lookup import lookup
from vil.utils.safe_files import join_roots, path_below, regular_file, unicode_hint

logger = logging.getLogger(__name__)

OPTIONAL = ("split", "group", "weight")  # columns


class Table(ImageDataset):
    """A dataset of images that a table lists, one per row. `file` is the table's path below root.

    The optional column `split` is train, val or test. Without it, all rows are training images, or
    images of every split if `all_rows` is set. Rows with the same text in the column `group` must
    be in the same split. The column `weight` has weights for the training loss.
    """

    splits = ("train", "val", "test")

    def __init__(
        self,
        root: Root,
        split: str,
        transform: Transform = None,
        *,
        file: str = "labels.csv",
        path_column: str = "path",
        label_column: str = "label",
        label_columns: Sequence[str] | str = (),
        separator: str = "|",
        text_labels: bool = False,
        images: str = ".",
        all_rows: bool = False,
        target_type: str = "class",
        extra_roots: Sequence[str] = (),
        channels: int = 3,
    ):
        """Read the table, and check that its images exist.

        Args:
            label_columns: columns to read instead of `label_column`. With target_type "numbers",
                each contains one of the K numbers. With "labels", each contains 0 or 1 for one of
                the K labels.
            separator: text between several labels in one cell, such as "|" in "cat|dog".
            text_labels: accept any text as a class name, including a mix of numbers and words, and
                texts that contain the separator.
            images: folder below root to which the paths in the table are relative.
            all_rows: if there is no column `split`, use all rows in every split.
            target_type: see `ImageDataset`.
            extra_roots: folders outside of root that may contain the table and the images.
            channels: see `read_image`.

        Raises ValueError for a missing column or an empty separator. Raises DataError for an
        invalid table, a missing or repeated image, or a group with several splits.
        """
        super().__init__(split, transform)
        self.target_type, self.channels = target_type, channels
        if not separator:
            raise ValueError("DATA.KWARGS.separator is empty: expected the text between labels")
        self.path = path_below(root, file, "the config", extra_roots)
        self.images = path_below(root, images, "DATA.KWARGS.images", extra_roots)
        if isinstance(label_columns, str):
            label_columns = [label_columns]
        columns = [str(name) for name in label_columns] or [str(label_column)]
        paths, given, labels = self._read(str(path_column), columns)
        paths = self._normalize(paths)
        in_split = self._select(given.get("split"), split, all_rows)
        if "group" in given:
            groups = number_keys([text or None for text in given["group"]])
            self._check_groups(given, groups)
            self.split_groups = groups[in_split]
        if "weight" in given:
            self.weights = read_weights(given["weight"], self.where)[in_split]
        is_train = in_split
        if "split" in given and split != "train" and "train" in given["split"]:
            is_train = np.array([text == "train" for text in given["split"]])
        self.classes, targets = read_targets(
            labels,
            columns if label_columns else [],
            target_type,
            self.where,
            is_train,
            separator=separator,
            text_labels=text_labels,
            name=str(label_column),
        )
        self.targets = targets[in_split]
        if target_type == "class" and (
            missing := set(range(len(self.classes))) - {*self.targets.tolist()}
        ):
            text = "%s: %d of %d classes have no images in the split %s, such as %s"
            counts = len(missing), len(self.classes), split
            logger.warning(text, self.path, *counts, self.classes[min(missing)])
        self.names = np.array([os.fsencode(paths[row]) for row in np.flatnonzero(in_split)])
        lines = [self.where.lines[row] for row in np.flatnonzero(in_split).tolist()]
        self._check_files(join_roots(root, extra_roots), lines)

    def _read(self, path_column: str, columns: Sequence[str]) -> tuple:
        """Read all rows as texts, and set `where`, the line numbers for error messages.

        Returns three values: the paths, a dict {optional column: its stripped texts}, and a list
        with the cells of each column in `columns`, see `Rows`.
        """
        rows = read_rows(self.path)
        required = {path_column, *columns}
        optional = [name for name in OPTIONAL if name in rows.columns and name not in required]
        at = {name: index for index, name in enumerate(rows.columns)}
        kind = f"column of {self.path.name}"
        wanted = [lookup(at, name, kind) for name in [path_column, *optional, *columns]]
        cells = [(line, *(record[index] for index in wanted)) for line, record in rows.cells]
        if not cells:
            raise DataError(f"{self.path} is empty: it has no rows below the row of column names")
        lines, paths, *others = zip(*cells)
        self.where = Location(self.path, rows.unit, lines)
        for name, column in zip([path_column, *optional], [paths, *others]):
            refuse_lists(column, name, self.where)
        texts = [[text.strip() for text in column] for column in others[: len(optional)]]
        return paths, dict(zip(optional, texts)), others[len(optional) :]

    def _normalize(self, paths: Iterable[str]) -> list[str]:
        """Normalize paths, such as "./a//1.jpg" to "a/1.jpg". Raises DataError if a path is empty
        or listed twice."""
        normal = [os.path.normpath(text.strip()) if text.strip() else "" for text in paths]
        self.where.refuse([not name or "\0" in name for name in normal], "have no path", normal)
        first: dict[str, int] = {}
        repeated = [first.setdefault(name, row) != row for row, name in enumerate(normal)]
        self.where.refuse(repeated, "have a path that was listed before", normal)
        return normal

    def _select(self, splits: Sequence[str] | None, split: str, all_rows: bool) -> np.ndarray:
        """Return a mask (rows,) bool of the rows in the split `split`.

        splits: text of each row in the column `split`, or None if the table lacks this column.
        Without it, all rows are training images, or images of every split if `all_rows` is set.
        Raises DataError if no row is selected, or if a text is not the name of a split.
        """
        if splits is None:
            if split == "train" or all_rows:
                return np.ones(len(self.where.lines), bool)
            raise DataError(
                f"{self.path} has no column 'split', so none of its rows are {split} images: add "
                f"the column, or set DATA.{split.upper()}_FRACTION to 0.2"
            )
        unknown = [text not in SPLITS for text in splits]
        self.where.refuse(unknown, f"have a split other than {', '.join(SPLITS)}", splits)
        selected = np.array([text == split for text in splits])
        if not selected.any():
            fraction = f", or set DATA.{split.upper()}_FRACTION to 0.2" if split != "train" else ""
            raise DataError(f"{self.path} has no rows of the split {split}: add some{fraction}")
        return selected

    def _check_groups(self, given: dict[str, Sequence[str]], groups: np.ndarray) -> None:
        """Raise DataError if the column `split` puts images of one group into different splits.

        given: {name of an optional column: text of each row}. groups (rows,): group number of each
        row, or -1 for a row without a group.
        """
        if "split" not in given:
            return
        first: dict[int, str] = {}
        torn = [
            group >= 0 and first.setdefault(group, split) != split
            for group, split in zip(groups.tolist(), given["split"])
        ]
        count = len({group for group, bad in zip(groups.tolist(), torn) if bad})
        problem = f"are in another split than the first image of their group ({count} groups)"
        self.where.refuse(torn, problem, given["group"])

    def _check_files(self, roots: Sequence[Root], lines: Sequence[int | str]) -> None:
        """Raise DataError if an image of this split is missing, or is not below one of the roots.
        lines: the table's line number for each image."""
        names = [os.fsdecode(name) for name in self.names]
        paths = [path_below(self.images, name, self.path, roots) for name in names]
        missing = [not path.is_file() for path in paths]
        where = self.where._replace(lines=lines)
        hint = unicode_hint(self.images, names[missing.index(True)]) if any(missing) else ""
        problem = f"name an image that does not exist below {self.images}{hint}"
        where.refuse(missing, problem, names)

    def content(self, index: int) -> bytes:
        return regular_file(self.images / self.sample_name(index)).read_bytes()

    def image(self, index: int) -> Image.Image | BandImage:
        return self.read(self.images / self.sample_name(index))

    def sample_name(self, index: int) -> str:
        """Return the image's path in the table, without redundant parts such as "./"."""
        return os.fsdecode(self.names[index])
