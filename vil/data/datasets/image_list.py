"""Images without classes, as a person names them: files, folders, standard input.

What `vil predict` reads; decoding, workers and the treatment of broken files are those of the
datasets.
"""

import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vil.data.batch import Batch
from vil.data.dataset import ImageDataset
from vil.data.datasets.folder import EXTENSIONS
from vil.data.image import read_image
from vil.data.robust_dataset import BadSampleLog, RobustDataset
from vil.data.samplers import eval_batches
from vil.data.workers import build_data_loader, iter_batches, start, stop_at_exit, stop_workers

logger = logging.getLogger(__name__)

STDIN = "-"


class ImageSource(NamedTuple):
    """A file, or the bytes of one that came through standard input."""

    name: str
    content: bytes | None = None


def find_images(words: Iterable[str], read_stdin: Callable[[], bytes]) -> list[ImageSource]:
    """What the words name, in their order: files, whether or not they exist; folders, for all
    pictures below them, sorted by path; "-", for what `read_stdin` gives.

    Standard input is one picture, or (text without NUL) a list of files and folders, one per line.
    Hidden files and folders, and symbolic links to folders, are passed over.
    """
    found = []
    for word in words:
        data = read_stdin() if word == STDIN else b""
        lines = [word] if word != STDIN else _lines(data)
        found += (
            [ImageSource(STDIN, data)]
            if lines is None
            else [picture for line in lines for picture in _at(line)]
        )
    return found


def _lines(data: bytes) -> list[str] | None:
    """The lines of a text that are not empty; None when it is no text."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return None if "\0" in text else list(filter(None, lines))


def _at(path: str) -> list[ImageSource]:
    """The pictures at a path; a folder without any is a warning."""
    if not os.path.isdir(path):  # False for what no file can be called, too
        return [ImageSource(path)]
    root = Path(path)
    below = sorted(
        file
        for file in root.rglob("*")
        if file.name.lower().endswith(EXTENSIONS)
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
        and not file.is_dir()
    )
    if not below:
        logger.warning("no pictures below %s (%s)", path, " ".join(EXTENSIONS))
    return [ImageSource(str(file)) for file in below]


class ImageList(ImageDataset):
    """Images as a dataset whose classes nobody knows."""

    def __init__(self, pictures: list[ImageSource], transform: Callable | None = None):
        super().__init__("val", transform)
        self.pictures = pictures
        self.classes = []
        self.targets = np.zeros(len(pictures), np.int64)

    def image(self, index: int) -> Image.Image:
        """The decoded picture. Raises UnreadableImage."""
        name, content = self.pictures[index]
        return read_image(name if content is None else io.BytesIO(content))

    def sample_name(self, index: int) -> str:
        """The path as it was given or found; "-" for standard input."""
        return self.pictures[index].name


class ImageListLoader:
    """Batches of pictures in their order. All may be broken: a batch then holds only reports."""

    def __init__(
        self,
        pictures: list[ImageSource],
        transform: Callable,
        *,
        batch_size: int,
        workers: int = 0,
        pin_memory: bool = False,
    ):
        order = eval_batches(len(pictures), batch_size=batch_size)
        self.loader = build_data_loader(
            RobustDataset(ImageList(pictures, transform)),
            order,
            workers=workers if len(order) > 1 else 0,
            pin_memory=pin_memory,
            context=None,
        )
        self.names = [picture.name for picture in pictures]
        self.bad_samples = BadSampleLog(len(pictures), max_fraction=1.0)

    def __iter__(self) -> Iterator[Batch]:
        """One pass; close() on it ends the workers. Each unreadable picture is a warning."""
        iterator = start(self.loader)
        stop_at_exit(iterator)
        try:
            for batch in iter_batches(iterator):
                self.bad_samples.record(batch.bad_samples)
                yield batch
        finally:
            stop_workers(iterator)
