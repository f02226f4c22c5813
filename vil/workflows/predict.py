"""Run a trained model on image files, folders, arrays or PIL images."""

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vil.data.bands import PIL_CHANNELS, to_display
from vil.data.datasets.digits import read_demo_digits
from vil.data.datasets.folder import EXTENSIONS
from vil.data.datasets.image_list import STDIN, ImageList, ImageSource, iter_image_batches
from vil.data.datasets.image_list import find_images as list_images
from vil.data.workers import worker_errors
from vil.engine.evaluation import evaluating
from vil.tasks.base import ImageMeta
from vil.utils.errors import DataError
from vil.utils.output_paths import make_folder, replacing
from vil.workflows.configure import Overrides
from vil.workflows.inference import InferenceModel, load_for_inference

IMAGE_SUFFIXES = (*EXTENSIONS, ".npy")
Images = str | Path | Image.Image | np.ndarray | Iterable[str | Path | Image.Image | np.ndarray]


def predict(
    source: str | Path | InferenceModel,
    images: Images,
    overrides: Overrides | None = None,
    *,
    batch_size: int | None = None,
    num_workers: int = 0,
) -> Iterator[Any]:
    """Yield a prediction for each image, in the order of the images.

    source: an InferenceModel, or the `source` of `vil.load_for_inference`. images: one or several
    files, folders (all images below them), PIL images or uint8 arrays (H, W, 3). For a model of
    other channels than gray or RGB, arrays (H, W, INPUT.CHANNELS) of any type of numbers.

    The prediction of a classifier has `file` and `classes`: (index, probability) pairs, the most
    probable first. The prediction of a detector has `file`, `size` (H, W) and `detections`. If an
    image cannot be read, its prediction's `error` is the reason, otherwise "". Raises DataError if
    there are no images.
    """
    model = source if isinstance(source, InferenceModel) else load_for_inference(source, overrides)
    if isinstance(images, str | Path | Image.Image | np.ndarray):
        images = [images]
    channels = model.cfg.INPUT.CHANNELS
    sources = [picture for each in images for picture in _open(each, channels)]
    if not sources:
        raise DataError("there are no images to predict")
    return iter_predictions(model, sources, batch_size, num_workers)


def _open(image: str | Path | Image.Image | np.ndarray, channels: int) -> list[ImageSource]:
    if isinstance(image, str | Path):
        return list_images([str(image)], lambda: b"", channels)
    buffer = io.BytesIO()
    if channels not in PIL_CHANNELS:
        np.save(buffer, np.asarray(image))
        return [ImageSource("array", buffer.getvalue())]
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    image.save(buffer, "PNG")
    return [ImageSource("array", buffer.getvalue())]


def find_images(
    words: Sequence[str],
    read_stdin: Callable[[], bytes],
    *,
    sample: bool = False,
    channels: int = 3,
) -> tuple[list[ImageSource], list[str]]:
    """Return the images that `words` specify or, if `sample`, the package's sample images.

    words: files, folders, or "-" for the image file whose content `read_stdin` returns. channels:
    INPUT.CHANNELS. Returns (images, classes): `classes` has the class names of the sample images,
    and is empty for other images. Raises DataError if there are no images.
    """
    if sample:
        return read_demo_digits()
    images = list_images(words, read_stdin, channels)
    if not images:
        raise DataError(f"no images in {', '.join(words)}")
    return images, []


class PredictionFolder:
    """Folder for copies of images with drawn predictions. Original images are never overwritten."""

    def __init__(self, folder: str | Path, images: Sequence[ImageSource]):
        self.folder, self.used = make_folder(folder, "--output"), set()
        self.originals = {Path(image.name).resolve() for image in images}

    def save(self, name: str, image: Image.Image) -> Path:
        """Save an image as NAME.png, or as NAME-2.png etc. if this would overwrite an earlier save
        or an original image. name: file name of the original image. Returns the file."""
        stem = "stdin" if name == STDIN else Path(name).stem
        numbered = (f"{stem}-{number}" for number in itertools.count(2))
        files = (self.folder / f"{each}.png" for each in itertools.chain([stem], numbered))
        free = next(f for f in files if f not in self.used and f.resolve() not in self.originals)
        self.used.add(free)
        with replacing(free, "--output") as aside:
            image.save(aside)
        return free


def predict_files(
    inference: InferenceModel,
    images: Sequence[ImageSource],
    drawing: PredictionFolder | None = None,
) -> Iterator[Any]:
    """Yield a prediction for each image, in order. drawing: folder in which to save copies of the
    images with the predictions drawn on them."""
    cfg = inference.cfg
    reading = dict(value_range=cfg.DATA.VALUE_RANGE, channels=cfg.INPUT.CHANNELS)
    originals = ImageList(list(images), **reading)
    predictions = iter_predictions(inference, images, cfg.DATALOADER.BSZ, cfg.DATALOADER.WORKERS)
    for index, prediction in enumerate(predictions):
        if drawing and not prediction.error:
            image = to_display(originals.image(index))
            drawing.save(prediction.file, inference.task.visualize(image, prediction))
        yield prediction


def iter_predictions(
    inference: InferenceModel,
    images: Sequence[ImageSource],
    batch_size: int | None,
    num_workers: int,
) -> Iterator[Any]:
    """Yield a prediction for each image, in order. batch_size: by default DATALOADER.BSZ of the
    model's config."""
    task = inference.task
    loader = iter_image_batches(
        images,
        inference.transform,
        batch_size=batch_size or inference.cfg.DATALOADER.BSZ,
        value_range=inference.cfg.DATA.VALUE_RANGE,
        channels=inference.cfg.INPUT.CHANNELS,
        workers=num_workers,
        pin_memory=task.device.type == "cuda",
    )
    with worker_errors(), closing(loader) as batches:
        for batch in batches:
            predictions = {
                bad.index: task.failed(bad.name, bad.reason) for bad in batch.bad_samples
            }
            if batch.samples:
                tensors, sizes, indices = zip(*batch.samples)
                metas = [ImageMeta(images[i].name, size) for i, size in zip(indices, sizes)]
                with evaluating(inference.model) as model:
                    output = task.run(model, tensors)
                predictions |= zip(indices, task.postprocess(output, metas))
            yield from (predictions[index] for index in sorted(predictions))
