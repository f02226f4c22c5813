"""The interface of a task: everything that differs between classification, detection, etc.

A task is a subclass of `Task` with an entry in the registry TASKS. The class is called as
task(cfg, device). The training loop, evaluation, inference, the report and the commands only use
the methods of `Task`, so they work for every task.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from vil.builders.cost import CostRow
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.target_summary import TargetSummary, summarize_targets
from vil.data.views import View
from vil.engine.distributed import DistInfo, unwrap
from vil.engine.evaluation import evaluating
from vil.engine.loop import Loss, Metric
from vil.report.html import Html
from vil.utils.errors import ConfigError
from vil.utils.json_text import to_json
from vil.utils.registry import Entry

Datasets = Mapping[str, Dataset] | None
Metrics = Mapping[str, tuple[str, str, bool]]  # {name: (label, unit, higher is better)}
OutputFormat = Callable[[Iterable[Any], Sequence[str]], Iterator[str]]


class ImageMeta(NamedTuple):
    """An image's file, and its size before any transform."""

    name: str
    size: tuple[int, int]  # (height, width) in pixels


class OpenData(NamedTuple):
    """The loaders of a config's datasets.

    tests: {part: {name: loader}}, see the argument `part` of `Task.test_loaders`. note: what
    differs from the datasets of a run, to be shown to the user.
    """

    train: TrainLoader
    tests: Mapping[str, Mapping[str, EvalLoader]]
    note: str = ""


class TaskReport(NamedTuple):
    """Content of the run report from a task: cards (title, value, remark) and HTML sections."""

    cards: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[Html] = ()


def make_metric(metrics: Metrics, name: str = "") -> Metric:
    """Return the metric `name` of those that a task's entry declares, by default the first."""
    name = name or next(iter(metrics))
    label, unit, higher_is_better = metrics[name]
    return Metric(name, higher_is_better, label, unit)


class Task:
    """Base class of all tasks. Methods without a default raise NotImplementedError.

    metric: the metric whose value on the first test set selects the `best` checkpoint.
    output_formats: {name: function} for `vil predict --format`, the default first. A function takes
    an iterable of predictions and the class names, and yields chunks of text.
    """

    metric: Metric
    output_formats: Mapping[str, OutputFormat] = {}
    class_names: Sequence[str] = ()  # of the model; set before datasets are opened
    resizes_to_image_size = True  # whether the network's input has INPUT.IMAGE_SIZE pixels
    # config values that `train_loader` derived from the training set, for the run's config.yaml
    learned_settings: Mapping[str, Any] = {}
    columns: Sequence[str] = ()  # metrics in the report's table of evaluations; empty: all
    counted = "images"  # what `count_classes` counts
    hint = ""  # advice after the last evaluation, for the log of a run; set on rank 0

    def __init__(
        self,
        *,
        device: torch.device,
        amp_dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        test_sets: Mapping[str, EvalLoader] | None = None,
        results_folder: Path | None = None,
    ):
        """Store the settings.

        amp_dtype: the dtype of autocast; None for full precision. test_sets: {name: loader}, on
        which `evaluate` measures; a call of `test_loaders` replaces them. results_folder: folder to
        which `evaluate` writes predictions, if the task writes any.
        """
        self.device, self.amp_dtype, self.memory_format = device, amp_dtype, memory_format
        self.test_sets = dict(test_sets or {})
        self.results_folder = results_folder

    # ---- built from the config

    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        """Build the network, with its head and any training-only modules, initialized from SEED.

        load_pretrained: load the published weights of a torchvision or timm model, if MODEL.ARCH
        names one and MODEL.PRETRAINED is set.
        """
        raise NotImplementedError

    def inference_model(self, model: nn.Module) -> nn.Module:
        """Return the model without modules that are used only in training."""
        return model

    def load_weights(self, model: nn.Module, path: Path, *, strict: bool) -> Any:
        """Load a weight file into the model and return a report of every key.

        strict: reject a file that lacks weights for some parameters, which would keep their initial
        values. Raises CheckpointError if the weights do not fit the model.
        """
        raise NotImplementedError

    def train_loader(
        self, dist: DistInfo, *, bad_file: Path | None = None, dataset: Dataset | None = None
    ) -> TrainLoader:
        """Build this rank's training loader.

        bad_file: file to which the names of unreadable images are appended. dataset: used instead
        of the config's training set.
        """
        raise NotImplementedError

    def test_loaders(
        self,
        dist: DistInfo,
        *,
        bad_file: Path | None = None,
        datasets: Datasets = None,
        part: str = "val",
    ) -> dict[str, EvalLoader]:
        """Build this rank's loader of each test set, and return {name: loader}.

        The loaders are also stored in `test_sets`. bad_file: file to which the names of unreadable
        images are appended. datasets: {name: dataset}, used instead of the config's test sets.
        part: "val" for the sets that select the best checkpoint, which are DATA.VAL or, if it is
        empty, DATA.TEST; "test" for DATA.TEST.
        """
        raise NotImplementedError

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> Dataset:
        """Build a synthetic dataset for --dry-run and benchmarks.

        Its images have the largest size of training images. folder: folder for files that the
        dataset writes. split: "train" or "val".
        """
        raise NotImplementedError

    @contextmanager
    def open_data(self) -> Iterator[OpenData]:
        """Open the config's datasets for a `with` block, to check and describe them.

        Raises ConfigError or DataError if they are invalid.
        """
        loader = self.train_loader(DistInfo())
        self.class_names = self.class_names or loader.classes
        yield OpenData(loader, {"val": self.test_loaders(DistInfo())})

    def count_classes(self, dataset: Dataset) -> dict[str, int]:
        """Return {class: number of images or objects} of a dataset; {} if it has no classes."""
        return {}

    def draw_batch(self, batch: Any) -> list[tuple[Image.Image, str]]:
        """Draw the images of a batch that `prepare` returned, as the model gets them.

        Returns (image, its target as text) pairs, or [] if the task cannot draw them.
        """
        return []

    # ---- called by `vil data check`

    def open_split(self, name: str | None = None, part: str = "val") -> Any:
        """Open the training set or, if `name` is given, the set `name` of DATA.VAL or DATA.TEST.

        part: "test" for DATA.TEST if there are sets in DATA.VAL too, otherwise "val". The dataset
        may have another number of classes than the config. It has the methods `image` and
        `sample_name` of `ImageDataset`. Raises DataError if the dataset is invalid.
        """
        if name is None:
            return self.train_loader(DistInfo()).samples.dataset
        return self.test_loaders(DistInfo(), part=part)[name].dataset

    def summarize_targets(self, dataset: Any) -> TargetSummary:
        """Count the images of each class of a dataset that `open_split` returned."""
        return summarize_targets(dataset)

    # ---- called by the training loop and by evaluation

    def prepare(self, batch: Any) -> Any:
        """Move a training batch to the device and apply the augmentations that run there."""
        return batch.to(self.device, self.memory_format)

    def split(self, batch: Any, num_parts: int) -> list[Any]:
        """Split a batch into `num_parts` consecutive parts of equal size."""
        samples = len(batch.indices)
        size = samples // num_parts
        message = f"{samples} images do not divide into {num_parts} equal parts"
        assert size * num_parts == samples > 0, message
        parts = [slice(start, start + size) for start in range(0, samples, size)]
        names = ("images", "targets", "indices")
        return [replace(batch, **{n: getattr(batch, n)[part] for n in names}) for part in parts]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a batch that `prepare` returned, and training metrics to log.

        The caller enables autocast.
        """
        raise NotImplementedError

    def evaluate(
        self, model: nn.Module, between: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, Any]]:
        """Evaluate the model on each test set and return {name of the test set: metrics}.

        The metrics are the same on every rank and do not depend on the number of ranks. between:
        called before each batch.
        """
        with evaluating(unwrap(model)) as plain:
            return {name: self.measure(plain, name, between) for name in self.test_sets}

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Return the metrics of a model in eval mode on the test set `name`.

        Implementations iterate over `vil.engine.evaluation.iter_in_step(self.test_sets[name],
        between)`, which calls `between` before each batch.
        """
        raise NotImplementedError

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Return additional lines to print for a test set, such as a table of classes."""
        return []

    def calibrate(self, model: nn.Module) -> dict[str, Any]:
        """Fit the calibration of the model's probabilities on the first test set, and return it as
        a dict for JSON. Returns {} if the task cannot be calibrated."""
        return {}

    def apply_calibration(self, calibration: Mapping[str, Any]) -> None:
        """Apply a result of `calibrate` to all outputs from now on, or remove it if it is {}."""

    def draw_worst(self, name: str, count: int, folder: Path) -> list[Path]:
        """Draw the `count` images with the most errors of the test set `name` to files in `folder`.

        Returns the files. `evaluate` must have been called before.
        """
        raise NotImplementedError

    # ---- called by inference

    def preprocess(self, image: Image.Image) -> Tensor:
        """Convert an RGB image to an input tensor of `run`."""
        raise NotImplementedError

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
        """Compute the model's output for a batch of preprocessed images."""
        raise NotImplementedError

    def postprocess(self, output: Any, metas: Sequence[ImageMeta]) -> list[Any]:
        """Convert the output of `run` to one prediction per image."""
        raise NotImplementedError

    def preprocess_views(self, image: Image.Image, views: Sequence[View]) -> Sequence[Tensor]:
        """Convert an RGB image to an input tensor of `run` per view, for test-time augmentation."""
        raise NotImplementedError

    def average_outputs(self, outputs: Sequence[Any]) -> Any:
        """Average outputs of `run` for the same images, from several views or several models.

        A task that defines this method and `preprocess_views` supports test-time augmentation and
        ensembles.
        """
        raise NotImplementedError

    def add_target(self, prediction: Any, target: str) -> Any:
        """Return a prediction with the true target of its image, as text. Needed to predict out of
        fold."""
        raise NotImplementedError

    def embed(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Return the pooled features (B, D) float32, on the CPU, of B preprocessed images, without
        the model's head. Needed by `vil embed`."""
        raise NotImplementedError

    def failed(self, name: str, reason: str) -> Any:
        """Return the prediction that stands for the unreadable image `name`, with the reason."""
        raise NotImplementedError

    def visualize(self, image: Image.Image, prediction: Any) -> Image.Image:
        """Draw a prediction onto a copy of its image. Raises ConfigError if the task cannot."""
        raise ConfigError(
            f"the task {type(self).__name__} cannot draw predictions: leave out --output"
        )

    # ---- called by the report and by `vil analyze`

    def report(self, model: nn.Module, class_names: Sequence[str], checkpoint: str) -> TaskReport:
        """Evaluate the model on the first test set for the run report.

        class_names: the model's classes. checkpoint: description of the checkpoint, which the
        report shows.
        """
        return TaskReport()

    def cost(self, model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
        """Count the parameters of each part of the model, and its multiply-accumulates per image.

        size: (height, width) of the image in pixels. The model may be on the meta device.
        """
        raise NotImplementedError


def format_json_array(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Format records as a JSON array with one record per line, and yield it in chunks."""
    separator = "[\n"
    for record in records:
        yield separator + to_json(record)
        separator = ",\n"
    yield "[]\n" if separator == "[\n" else "\n]\n"


REQUIRED = ("build_model", "load_weights", "train_loader", "test_loaders", "loss", "measure")


def check_task(task: Any, entry: Entry) -> None:
    """Raise ValueError unless `task` is a subclass of Task that defines the methods in REQUIRED.

    A class that overrides `evaluate` needs no `measure`.
    """
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ValueError(f"task {entry.name!r} must subclass vil.tasks.base.Task, got {task!r}")
    missing = [name for name in REQUIRED if getattr(task, name) is getattr(Task, name)]
    if task.evaluate is not Task.evaluate and "measure" in missing:
        missing.remove("measure")
    if missing:
        raise ValueError(
            f"task {entry.name!r} ({task.__name__}) must define the methods {', '.join(missing)}"
        )
