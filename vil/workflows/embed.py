"""Compute the features of images with a trained model, without its head.

Shapes: N images, D features.
"""

import csv
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from yacs.config import CfgNode

from vil.data.batch import BadSample
from vil.data.build import read_options
from vil.data.classes import match_classes
from vil.data.datasets.image_list import ImageList, ImageSource, iter_image_batches
from vil.data.datasets.image_list import Images as ImageCollection
from vil.data.workers import count_workers, worker_errors
from vil.engine.evaluation import evaluating
from vil.streaming.map_files import create_map
from vil.tasks import refuse_without
from vil.tasks.image.probe import Labeled, Probe, probe_features
from vil.utils.atomic_write import ESCAPED_TEXT
from vil.utils.errors import ConfigError, DataError, in_python_words
from vil.utils.global_state import preserve_global_state
from vil.utils.output_paths import replacing
from vil.utils.plural import plural
from vil.workflows.configure import Overrides
from vil.workflows.inference import (
    InferenceModel,
    as_inference_model,
    check_memory,
    load_model,
    open_test_sets,
)
from vil.workflows.predict import NOT_FINITE, Images, check_batch_size, open_images

COLUMNS = ("row", "file", "error")


@dataclass
class ProbeResult:
    """Result of `probe`.

    num_features: number of features per image. num_images: {"train" or name of a test set: number
    of images}. probes: the fitted classifiers with their accuracies. report: text that states which
    weights were loaded.
    """

    num_features: int
    num_images: dict[str, int]
    probes: list[Probe]
    report: str


@in_python_words
def embed(
    source: str | Path | InferenceModel,
    images: Images,
    overrides: Overrides | None = None,
    *,
    batch_size: int | None = None,
    num_workers: int = 0,
) -> np.ndarray:
    """Return the features of N images as an array (N, D) float32.

    The features of an image are the pooled output of the model before its head, or NaN if the image
    cannot be read. source: as in `vil.predict`, but only one model. images, overrides, batch_size,
    num_workers: see `vil.predict`. Raises DataError if no image can be read.
    """
    check_batch_size(batch_size)
    model = as_inference_model(source, overrides, needs_head=False)
    check_embed(model.cfg.TASK)
    cfg = model.cfg
    collection = open_images(images, cfg)
    return collect_features(model, collection, batch_size, num_workers)[0]


def check_embed(task: str) -> None:
    """Raise ConfigError if a task does not compute a feature vector per image. task: its name."""
    refuse_without(task, "embed", "vil embed needs a model with one feature vector per image")


def collect_features(
    model: InferenceModel,
    images: ImageCollection,
    batch_size: int | None = None,
    num_workers: int | None = None,
    file: Path | None = None,
) -> tuple[np.ndarray, list[str]]:
    """Compute the features of all images. Returns (features, errors).

    features: (N, D) float32, NaN for images that cannot be read or whose features are not finite.
    errors: for each image, why its features are NaN, or "".
    file: .npy file for the features. The returned array is then a memory map of it.
    batch_size, num_workers: None for the values in the model's config.
    Raises DataError if no image can be read, and SaveError if the disk is full.
    """
    check_memory(model)
    task, loading = model.task, model.cfg.DATALOADER
    loader = iter_image_batches(
        images,
        model.transform,
        batch_size=batch_size or loading.BSZ,
        workers=count_workers(loading.WORKERS if num_workers is None else num_workers, task.device),
        pin_memory=task.device.type == "cuda",
    )
    features, unreadable = None, []
    with worker_errors(), closing(loader) as batches:
        for batch in batches:
            unreadable += batch.bad_samples
            if not batch.samples:
                continue
            inputs, _, indices = zip(*batch.samples)
            with evaluating(model.model) as network:
                rows = task.embed(network, inputs).numpy()
            if features is None:
                shape = (len(images), rows.shape[1])
                if file is None:
                    features = np.empty(shape, np.float32)
                else:
                    features = create_map(file, shape, np.dtype(np.float32))
            features[list(indices)] = rows
            for index, row in zip(indices, rows):
                if not np.isfinite(row).all():
                    name = images.sample_name(index)
                    unreadable.append(BadSample(index, name, NOT_FINITE))
    if features is None or len(unreadable) == len(images):
        raise DataError(f"none of the {plural(len(images), 'image')} could be read")
    errors = [""] * len(images)
    for bad in unreadable:
        features[bad.index], errors[bad.index] = np.nan, bad.reason
    return features, errors


def embed_files(model: InferenceModel, images: Sequence[ImageSource], file: Path) -> tuple:
    """Write the features of images to a .npy file, and their names to a .csv file next to it.

    The .csv file has the columns row, file and error. Returns (shape of the features, number of
    images that cannot be read).
    """
    cfg = model.cfg
    collection = ImageList(images, **read_options(cfg))
    table = file.with_suffix(".csv")
    with (
        replacing(table, "--output-file") as names_aside,
        replacing(file, "--output-file") as aside,
    ):
        features, errors = collect_features(model, collection, file=aside)
        shape = features.shape
        if isinstance(features, np.memmap):
            features.flush()
        del features
        with names_aside.open("w", **ESCAPED_TEXT) as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            rows = ((n, image.name, error) for n, (image, error) in enumerate(zip(images, errors)))
            writer.writerows(rows)
    return shape, sum(map(bool, errors))


def probe(cfg: CfgNode, class_names: Sequence[str] = ()) -> ProbeResult:
    """Measure the accuracy of simple classifiers on the features of a config's model.

    k nearest neighbors and a linear probe are fitted to the training images, without augmentation,
    and evaluated on each test set. class_names: names of the classes that the weights were trained
    on. Raises ConfigError if the targets are not classes.
    """
    check_embed(cfg.TASK)
    with preserve_global_state():
        model = load_model(cfg, class_names, needs_head=False)
        task: Any = model.task
        # "": a task that ignores the targets of its images
        if getattr(task, "target_type", None) not in ("class", "") or cfg.DATA.TARGETMAP:
            raise ConfigError(
                "--probe needs one class per image, and the same classes in all sets, but TASK is "
                f"{cfg.TASK!r}" + (" with DATA.TARGETMAP" if cfg.DATA.TARGETMAP else "")
            )
        train = task.open_train_set()
        task.class_names = train.classes  # of the data, not of the model's head
        sets = {"train": train, **open_test_sets(task)}
        if any(dataset.target_type != "class" for dataset in sets.values()):
            raise ConfigError("--probe needs one class per image: use other sets")
        by_position = cfg.DATA.CLASSES == "by_position"
        for name, dataset in sets.items():
            match_classes(dataset, train.classes, name, by_position=by_position)
        labeled = {name: _label(model, dataset) for name, dataset in sets.items()}
        counts = {name: len(part.classes) for name, part in labeled.items()}
        first = labeled.pop("train")
        return ProbeResult(
            num_features=first.features.shape[1],
            num_images=counts,
            probes=probe_features(first, labeled),
            report=model.report,
        )


def _label(model: InferenceModel, dataset: Any) -> Labeled:
    """Return the features and the classes of those images of a dataset that can be read."""
    features, errors = collect_features(model, dataset)
    is_readable = np.array([not error for error in errors])
    return Labeled(features[is_readable], np.asarray(dataset.targets)[is_readable])
