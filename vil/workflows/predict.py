"""Run trained models on image files, folders, arrays or PIL images."""

import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torchvision.models import WeightsEnum
from yacs.config import CfgNode

from vil.data.bands import PIL_CHANNELS, to_display
from vil.data.build import read_options
from vil.data.datasets.digits import read_demo_digits
from vil.data.datasets.folder import EXTENSIONS
from vil.data.datasets.image_list import STDIN, ImageList, ImageSource, iter_image_batches
from vil.data.datasets.image_list import Images as ImageCollection
from vil.data.datasets.image_list import find_images as list_images
from vil.data.image import UnreadableImage, open_image
from vil.data.workers import count_workers, worker_errors
from vil.tasks import TASKS, refuse_without
from vil.tasks.base import Drawing, ImageMeta
from vil.utils.errors import ConfigError, DataError, in_python_words
from vil.utils.exif import orientation
from vil.utils.output_paths import make_folder, replacing
from vil.workflows.configure import Overrides
from vil.workflows.ensemble import Ensemble, find_runs, make_ensemble
from vil.workflows.inference import (
    InferenceModel,
    as_inference_model,
    check_memory,
    is_finite,
)

IMAGE_SUFFIXES = (*EXTENSIONS, ".npy")
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes of PIL that fit into a PNG
TIFF_MODES = ("CMYK", "F", "I", "I;16B", "I;16L", "LAB", "YCbCr")  # into a TIFF file only
OTHER_MODES = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}  # into neither; others become RGB
MARK = "Software", "vil predict"  # PNG text that marks an image with drawn predictions
MAX_STEM = 200  # bytes of a file name; file systems allow 255
TOP = 5  # classes per image
NOT_FINITE = "its pixels or the model's outputs for it are NaN or infinite"
Images = str | Path | Image.Image | np.ndarray | Iterable[str | Path | Image.Image | np.ndarray]
Source = str | Path | WeightsEnum | InferenceModel


@in_python_words
def predict(
    source: Source | Sequence[Source],
    images: Images,
    overrides: Overrides | None = None,
    *,
    tta: str | int | None = None,
    batch_size: int | None = None,
    num_workers: int = 0,
) -> Iterator[Any]:
    """Yield a prediction for each image, in the order of the images.

    source: an InferenceModel, a `source` of `vil.load_for_inference`, a pattern such as
    "runs/fold*" that matches several runs, or a list of these. The outputs of several models are
    averaged.
    images: one or several files, folders (all images below them), PIL images or uint8 arrays
    (H, W, 3). For a model whose images are neither gray nor RGB, arrays must have shape
    (H, W, INPUT.CHANNELS) and may have any numeric type.
    overrides: changes to the config.
    tta: test-time augmentation: "hflip", "crops", "crops+hflip" or a number of views, see
    `vil.data.views.parse_views`.
    batch_size: None for DATALOADER.BSZ of the config.
    num_workers: number of processes that read images.

    The prediction of a classifier has the attributes `file`, `classes` ((index, probability) pairs,
    the most probable first) and `names` (names of these classes). The prediction of a detector has
    `file`, `size` (H, W) and `detections`. Both have `error`: the reason why the image cannot be
    read, or "". Raises DataError if there are no images, and ConfigError if the models have
    different classes, or if there are overrides for an InferenceModel.
    """
    check_batch_size(batch_size)
    ensemble = make_ensemble(load_models(source, overrides), tta)
    cfg = ensemble.cfg
    collection = open_images(images, cfg)
    return iter_predictions(ensemble, collection, batch_size, num_workers)


def check_batch_size(batch_size: int | None) -> None:
    """Raise ConfigError if a batch size is less than 1."""
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")


def load_models(
    source: Source | Sequence[Source], overrides: Overrides | None = None
) -> list[InferenceModel]:
    """Load one or several models; see `predict` for the arguments."""
    sources = source if isinstance(source, list | tuple) else [source]
    if not sources:
        raise ConfigError("no model to load: give at least one source")
    models = []
    for each in sources:
        names = find_runs([each]) if isinstance(each, str | Path) else [each]
        models += [as_inference_model(name, overrides) for name in names]
    return models


def open_images(images: Images, cfg: CfgNode) -> ImageList:
    """Convert files, folders, PIL images or arrays to an `ImageList`.

    images: see `predict`. cfg: config that says how images are read. Raises DataError if there are
    no images.
    """
    several = isinstance(images, Iterable)
    if isinstance(images, str | bytes | Path | Image.Image | np.ndarray | Tensor) or not several:
        images = [images]
    sources = [picture for each in images for picture in _open(each, cfg.INPUT.CHANNELS)]
    if not sources:
        raise DataError("there are no images to predict")
    _check_exists(sources)
    return ImageList(sources, **read_options(cfg))


def _open(image: str | Path | Image.Image | np.ndarray, channels: int) -> list[ImageSource]:
    if isinstance(image, str | Path):
        return list_images([str(image)], lambda: b"", channels)
    if not isinstance(image, Image.Image | np.ndarray):
        advice = ", such as tensor.permute(1, 2, 0).numpy()" if isinstance(image, Tensor) else ""
        raise DataError(
            f"images: expected paths, PIL images or uint8 arrays (H, W, 3){advice}, got "
            f"{type(image).__name__}"
        )
    shape = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else "an empty image"
    buffer = io.BytesIO()
    if isinstance(image, Image.Image):
        if getattr(image, "tile", ()) and image.format in ("PNG", "TIFF") and image.tell() == 0:
            # not loaded yet: the file may have more bits per channel than PIL reads
            image.fp.seek(0)
            return [ImageSource("array", image.fp.read())]
        image.load()
        if orientation(image) != 1:
            image = _turn_upright(image)
    if channels not in PIL_CHANNELS:
        np.save(buffer, np.asarray(image))
        return [ImageSource("array", buffer.getvalue())]
    if isinstance(image, np.ndarray):
        try:
            image = Image.fromarray(image)
        except TypeError:
            image = None
    if image is None or not all(image.size):
        raise DataError(f"images: expected a uint8 array (H, W, 3), or a list of them, got {shape}")
    if image.mode not in (*PNG_MODES, *TIFF_MODES):
        image = image.convert(OTHER_MODES.get(image.mode, "RGB"))
    image.save(buffer, "PNG" if image.mode in PNG_MODES else "TIFF")
    return [ImageSource("array", buffer.getvalue())]


def _turn_upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # PIL raises any exception for invalid EXIF data; the pixels may be valid
        return image


def find_images(
    words: Sequence[str],
    read_stdin: Callable[[], bytes],
    *,
    sample: bool = False,
    channels: int = 3,
) -> tuple[list[ImageSource], list[str]]:
    """List the images in files and folders or, if `sample` is True, the package's sample images.

    words: paths of files and folders, or "-" for standard input.
    read_stdin: returns the content of standard input: an image file, or a list of paths, one per
    line.
    channels: value of INPUT.CHANNELS.

    Returns (images, classes). `classes` has the true class of each sample image, and is empty for
    other images. Raises DataError if no image is found, or if all given paths are missing.
    """
    if sample:
        return read_demo_digits()
    images = list_images(words, read_stdin, channels)
    if not images:
        raise DataError(f"no images in {', '.join(words)}")
    _check_exists(images)
    return images, []


def _check_exists(images: Sequence[ImageSource]) -> None:
    """Raise DataError if all images are files that do not exist."""
    if not any(image.content is not None or os.path.lexists(image.name) for image in images):
        raise DataError(f"there is no file or folder {', '.join(i.name for i in images):.200}")


def task_settings(
    task: str, output_format: str | None, top: int | None, threshold: float | None
) -> dict[str, Any]:
    """Return the arguments of `Task.limit_classes` for predictions in an output format.

    task: name of the task. top: number of most probable classes per image, by default TOP.
    threshold: smallest probability of a predicted class; None for no threshold. Raises ConfigError
    if either is given and the task does not support it, or if either is given for a format that
    includes all classes.
    """
    task_class = TASKS.entry(task).load()
    if not task_class.output_formats:  # the task of a plug-in
        raise ConfigError(f"TASK {task} has no output formats, so it cannot write predictions")
    complete = output_format in task_class.complete_formats
    given = {"top": top, "threshold": threshold}
    if complete and (names := [name for name, value in given.items() if value is not None]):
        raise ConfigError(f"--format {output_format} includes every class: remove --{names[0]}")
    if top is threshold is None:
        return {"top": None if complete else TOP}
    why = (
        "--top and --threshold are for one class per image: leave them out (detectors: set "
        "DETECTION.TEST.SCORE)"
    )
    refuse_without(task, "limit_classes", why)
    return {"top": top or TOP, "threshold": threshold or 0.0}


class PredictionFolder:
    """Folder for copies of images on which predictions are drawn, and for other images and arrays
    of predictions. The images are PNG files with the text MARK in their metadata."""

    def __init__(self, folder: str | Path):
        """Create the folder. Raises ConfigError if it has other images: a training set that is read
        from this folder would otherwise include the copies."""
        self.folder, self.used = make_folder(folder, "--output"), set()
        images = (file for file in self.folder.iterdir() if file.suffix.lower() in EXTENSIONS)
        if other := next((file for file in images if not is_drawn(file)), None):
            raise ConfigError(
                f"--output {folder} has images that vil did not draw, such as {other.name}: choose "
                "another folder"
            )

    def save(self, name: str, drawings: Drawing | Mapping[str, Drawing]) -> None:
        """Save the drawn copy of an image such as cat.jpg as cat.png, or several drawings.

        If cat.png was saved by this object, the copy is saved as cat-2.png, and so on. name: file
        name of the original image. drawings: see `Task.visualize`. A drawing with the key "-x" is
        saved as cat-x.png, and an array as cat-x.npy.
        """
        if not isinstance(drawings, Mapping):
            drawings = {"": drawings}
        files = {
            f"{end}.npy" if isinstance(drawing, np.ndarray) else f"{end}.png": drawing
            for end, drawing in drawings.items()
        }
        stem = "stdin" if name == STDIN else shorten_name(Path(name).stem)
        stems = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        free = next(each for each in stems if self.used.isdisjoint(each + end for end in files))
        about = PngInfo()
        about.add_text(*MARK)
        for end, drawing in files.items():
            self.used.add(free + end)
            with replacing(self.folder / (free + end), "--output") as aside:
                if isinstance(drawing, np.ndarray):
                    np.save(aside, drawing)
                else:
                    drawing.save(aside, pnginfo=about)


def is_drawn(file: Path) -> bool:
    """Return whether a file is an image with the text MARK."""
    key, value = MARK
    try:
        with open_image(file) as image:
            return image.info.get(key) == value
    except UnreadableImage:
        return False


def shorten_name(stem: str) -> str:
    """Cut a file name to MAX_STEM bytes, which leave room for a number, a suffix, and the name of
    the temporary file."""
    encoded = os.fsencode(stem)
    return stem if len(encoded) <= MAX_STEM else encoded[:MAX_STEM].decode("utf-8", "ignore")


def predict_files(
    ensemble: Ensemble,
    images: Sequence[ImageSource],
    drawing: PredictionFolder | None = None,
    targets: Sequence[str] = (),
) -> Iterator[Any]:
    """Yield a prediction for each image, in order. drawing: folder for copies of the images on
    which the predictions are drawn. targets: true class of each image, if known."""
    cfg, task = ensemble.cfg, ensemble.task
    originals = ImageList(images, **read_options(cfg))
    predictions = iter_predictions(ensemble, originals, cfg.DATALOADER.BSZ, cfg.DATALOADER.WORKERS)
    for index, prediction in enumerate(predictions):
        if targets and task.supports("add_target"):
            prediction = task.add_target(prediction, targets[index])
        if drawing and not prediction.error:
            image = to_display(originals.image(index))
            drawing.save(prediction.file, task.visualize(image, prediction))
        yield prediction


def iter_predictions(
    ensemble: Ensemble,
    images: ImageCollection,
    batch_size: int | None,
    num_workers: int,
) -> Iterator[Any]:
    """Yield a prediction for each image, in order. batch_size: None for DATALOADER.BSZ of the first
    model's config, and for 1 if images have different sizes, whose outputs may be large."""
    task = ensemble.task
    default = ensemble.cfg.DATALOADER.BSZ if task.resizes_to_image_size else 1
    for model in ensemble.models:
        check_memory(model)
    loader = iter_image_batches(
        images,
        ensemble.preprocess,
        batch_size=batch_size or default,
        workers=count_workers(num_workers, ensemble.task.device),
        pin_memory=task.device.type == "cuda",
    )
    with worker_errors(), closing(loader) as batches:
        for batch in batches:
            predictions = {
                bad.index: task.failed(bad.name, bad.reason) for bad in batch.bad_samples
            }
            if batch.samples:
                inputs, sizes, indices = zip(*batch.samples)
                metas = [ImageMeta(images.sample_name(i), s) for i, s in zip(indices, sizes)]
                output = ensemble.run(inputs)
                predictions |= zip(indices, task.postprocess(output, metas))
                for index, tensors, row in zip(indices, inputs, output):
                    if not (is_finite(tensors) and is_finite(row)):
                        name = images.sample_name(index)
                        predictions[index] = task.failed(name, NOT_FINITE)
            yield from (predictions[index] for index in sorted(predictions))
