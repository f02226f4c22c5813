"""Unlabeled images from files, folders or standard input, for `vil predict`.

Workers load and decode the images, as for the datasets. Unreadable images are logged.
"""

import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from PIL import Image
from torch.utils.data import Dataset

from vil.data.bands import BandImage
from vil.data.batch import BadSample
from vil.data.datasets.folder import extensions
from vil.data.image import read_image
from vil.data.robust_dataset import BadSampleLog, RobustDataset
from vil.data.samplers import eval_batches
from vil.data.workers import build_data_loader, iter_batches
from vil.utils.rgb import WHITE

logger = logging.getLogger(__name__)

STDIN = "-"


class ImageSource(NamedTuple):
    """An image file. If `content` is None, `name` is the path of the file. Otherwise, `content` has
    the bytes of the file, and `name` is any name for messages and results."""

    name: str
    content: bytes | None = None


def find_images(
    words: Iterable[str], read_stdin: Callable[[], bytes], channels: int = 3
) -> list[ImageSource]:
    """Return the images that command-line arguments specify, in the order of the arguments.

    channels: number of channels of the images. Each of the `words` is one of the following:
    - a file, which need not exist
    - a folder: all images below it, sorted by path, without hidden files and folders;
      links to other folders are not followed
    - "-": the bytes that `read_stdin` returns. UTF-8 text without NUL is a list of files
      and folders, one per line. Any other bytes are one image.
    """
    images = []
    for word in words:
        data = read_stdin() if word == STDIN else None
        lines = [word] if data is None else split_lines(data)
        if lines is None:
            images.append(ImageSource(STDIN, data))
        for line in lines or ():
            images += images_at(line, channels)
    return images


def split_lines(data: bytes) -> list[str] | None:
    """Return the nonempty lines of UTF-8 text, or None if the data are not text."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return None if "\0" in text else list(filter(None, lines))


def images_at(path: str, channels: int = 3) -> list[ImageSource]:
    """Return the image at a path, or all images below a folder. Warns if the folder has none."""
    if not os.path.isdir(path):  # also False for a string that is not a valid path
        return [ImageSource(path)]
    root, endings = Path(path), extensions(channels)
    files = sorted(
        file
        for file in root.rglob("*")
        if file.name.lower().endswith(endings)
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
        and not file.is_dir()
    )
    if not files:
        text = "no images below %s: expected file names that end in one of %s"
        logger.warning(text, path, " ".join(endings))
    return [ImageSource(str(file)) for file in files]


class PredictionBatch(NamedTuple):
    """A batch of `vil predict`. An item of `samples` is (tensor, size, index), where size is the
    (height, width) of the image before the transform. index is the image's index in the dataset.
    `bad_samples` reports the images that could not be read."""

    samples: list[tuple]
    bad_samples: tuple[BadSample, ...]


class Images(Protocol):
    """The interface that prediction needs. `ImageList` and every `ImageDataset` implement it."""

    def __len__(self) -> int: ...

    # RGB or a BandImage; raises OSError if it cannot be read
    def image(self, index: int) -> Image.Image | BandImage: ...

    def sample_name(self, index: int) -> str: ...


class ImageList:
    """A list of unlabeled images, which are decoded at each access. value_range: for images with
    more than 8 bits, the values (low, high) that become 0 and 255, see `to_rgb`. channels,
    background: see `read_image`."""

    def __init__(
        self,
        images: Sequence[ImageSource],
        value_range: Sequence[float] = (),
        channels: int = 3,
        background: Sequence[int] = WHITE,
    ):
        self.images, self.value_range, self.channels = images, value_range, channels
        self.background = background

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Image.Image | BandImage:
        """Decode and return an image, see `read_image`. Raises UnreadableImage if that fails."""
        name, content = self.images[index]
        source = name if content is None else io.BytesIO(content)
        return read_image(source, self.value_range, self.channels, self.background)

    def sample_name(self, index: int) -> str:
        """Return the path of the image or, for an image that was given as bytes, its name."""
        return self.images[index].name


class TransformedImages(Dataset):
    """A dataset that applies `transform` to each of the `images`. An item is (transformed image,
    size), where size is the (height, width) of the image before the transform."""

    collate = PredictionBatch

    def __init__(self, images: Images, transform: Callable):
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def sample_name(self, index: int) -> str:
        return self.images.sample_name(index)

    def __getitem__(self, index: int) -> tuple:
        image = self.images.image(index)
        return self.transform(image), (image.height, image.width)


def iter_image_batches(
    images: Images, transform: Callable, *, batch_size: int, **options: Any
) -> Iterator[PredictionBatch]:
    """Yield the transformed images in order, in PredictionBatches of at most `batch_size` images.

    Unreadable images are logged and omitted, however many there are. Closing the iterator stops the
    workers. options: further arguments of `build_data_loader`.
    """
    order = eval_batches(len(images), batch_size=batch_size)
    if len(order) <= 1:
        options["workers"] = 0
    loader = build_data_loader(
        RobustDataset(TransformedImages(images, transform)), order, **options
    )
    bad_samples = BadSampleLog(len(images), max_fraction=1.0)
    with closing(iter_batches(loader)) as batches:
        for batch in batches:
            bad_samples.record(batch.bad_samples)
            yield batch
