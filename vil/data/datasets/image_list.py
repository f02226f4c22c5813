"""Images without classes, given as files, folders or standard input: the input of `vil predict`.

Decoding, workers and the handling of broken files are those of the datasets.
"""

import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch.utils.data import Dataset

from vil.data.batch import BadSample
from vil.data.datasets.folder import EXTENSIONS
from vil.data.image import read_image
from vil.data.robust_dataset import BadSampleLog, RobustDataset
from vil.data.samplers import eval_batches
from vil.data.workers import build_data_loader, iter_batches

logger = logging.getLogger(__name__)

STDIN = "-"


class ImageSource(NamedTuple):
    """The path of an image file, or a name and the file's bytes."""

    name: str
    content: bytes | None = None


def find_images(words: Iterable[str], read_stdin: Callable[[], bytes]) -> list[ImageSource]:
    """The images that the words of a command line name, in their order.

    A word is a file, which need not exist; a folder, for all images below it, sorted by path; or
    "-", for the bytes that `read_stdin` returns: one image, or (UTF-8 text without NUL) a list of
    files and folders, one per line. Hidden files and folders and links to folders are skipped.
    """
    images = []
    for word in words:
        data = read_stdin() if word == STDIN else None
        lines = [word] if data is None else split_lines(data)
        if lines is None:
            images.append(ImageSource(STDIN, data))
        for line in lines or ():
            images += images_at(line)
    return images


def split_lines(data: bytes) -> list[str] | None:
    """The lines of a text that are not empty; None if the data are not text."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return None if "\0" in text else list(filter(None, lines))


def images_at(path: str) -> list[ImageSource]:
    """The images at a path. Warns about a folder without any."""
    if not os.path.isdir(path):  # also False for a string that is not a valid path
        return [ImageSource(path)]
    root = Path(path)
    files = sorted(
        file
        for file in root.rglob("*")
        if file.name.lower().endswith(EXTENSIONS)
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
        and not file.is_dir()
    )
    if not files:
        logger.warning("no images below %s (%s)", path, " ".join(EXTENSIONS))
    return [ImageSource(str(file)) for file in files]


class PredictionBatch(NamedTuple):
    """samples: (tensor, (height, width) before the transform, index) of each readable image."""

    samples: list[tuple]
    bad_samples: tuple[BadSample, ...]


class ImageList(Dataset):
    """[i] -> (tensor, (height, width) before the transform)."""

    collate = PredictionBatch

    def __init__(self, images: list[ImageSource], transform: Callable | None = None):
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Image.Image:
        """The decoded image. Raises UnreadableImage."""
        name, content = self.images[index]
        return read_image(name if content is None else io.BytesIO(content))

    def sample_name(self, index: int) -> str:
        """The path as it was given or found; "-" for standard input."""
        return self.images[index].name

    def __getitem__(self, index: int) -> tuple:
        image = self.image(index)
        return self.transform(image), (image.height, image.width)


def iter_image_batches(
    images: list[ImageSource], transform: Callable, *, batch_size: int, **options: Any
) -> Iterator[PredictionBatch]:
    """Yield images in order, a batch at a time. Any number may be unreadable, which is logged.

    options: those of `build_data_loader`. close() stops the workers.
    """
    order = eval_batches(len(images), batch_size=batch_size)
    if len(order) <= 1:
        options["workers"] = 0
    loader = build_data_loader(RobustDataset(ImageList(images, transform)), order, **options)
    bad_samples = BadSampleLog(len(images), max_fraction=1.0)
    with closing(iter_batches(loader)) as batches:
        for batch in batches:
            bad_samples.record(batch.bad_samples)
            yield batch
