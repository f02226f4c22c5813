"""The interface of a task: everything that differs between classification, detection, etc.

Code outside of `vil/tasks` never asks which task it has. A task is a folder here, or a file of a
user, and an entry in TASKS. Its class is called as `task(cfg, device)` and turns the settings it
reads into attributes. The training loop, evaluation, inference, the report and the commands call
the methods below.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from yacs.config import CfgNode

from vil.builders import data
from vil.builders.cost import CostRow
from vil.builders.device import amp_dtype, memory_format
from vil.data.loader import EvalLoader, TrainLoader
from vil.engine.distributed import DistInfo, unwrap
from vil.engine.evaluation import evaluating
from vil.engine.loop import Loss, Metric
from vil.report.html import Html
from vil.utils.errors import as_config_error
from vil.utils.registry import Entry

Datasets = Mapping[str, Dataset] | None
OutputFormat = Callable[[Iterable[Any], Sequence[str]], Iterator[str]]


class ImageMeta(NamedTuple):
    """An image's file, and its size before any transform."""

    name: str
    size: tuple[int, int]  # (height, width) in pixels


class TaskReport(NamedTuple):
    """A task's part of the run report: cards (title, value, remark) and sections."""

    cards: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[Html] = ()


class Task:
    """Base class of all tasks; a method without a default raises NotImplementedError.

    metric: of the first test set, selects the `best` checkpoint.
    output_formats: {name: function} of `vil predict --format`, the default first; each formats an
    iterable of predictions and the class names as chunks of text.
    """

    metric: Metric
    output_formats: Mapping[str, OutputFormat] = {}
    class_names: Sequence[str] = ()  # names of the model's classes; set by inference
    columns: Sequence[str] = ()  # metrics in the report's table of evaluations, empty: all

    def __init__(
        self,
        *,
        device: torch.device,
        amp_dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        test_sets: Mapping[str, EvalLoader] | None = None,
        results_folder: Path | None = None,
    ):
        """amp_dtype: of autocast, None: full precision. test_sets: evaluated by `evaluate`, set by
        `test_loaders`. results_folder: for the predictions that `evaluate` writes, if any."""
        self.device, self.amp_dtype, self.memory_format = device, amp_dtype, memory_format
        self.test_sets = dict(test_sets or {})
        self.results_folder = results_folder

    # ---- built from the config

    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        """Build the network and its head, initialized from SEED, with auxiliary trainable parts.

        load_pretrained: with MODEL.PRETRAINED, load an external model's published weights.
        """
        raise NotImplementedError

    def inference_model(self, model: nn.Module) -> nn.Module:
        """Return the model without its auxiliary parts."""
        return model

    def load_weights(self, model: nn.Module, path: Path, *, strict: bool) -> Any:
        """Load a weight file and return a report of every key.

        strict: reject a file that leaves parameters at their initial values. Raises CheckpointError
        for weights that do not fit.
        """
        raise NotImplementedError

    def train_loader(
        self, dist: DistInfo, *, bad_file: Path | None = None, dataset: Dataset | None = None
    ) -> TrainLoader:
        """Build the training loader of one rank; `dataset` replaces the config's."""
        raise NotImplementedError

    def test_loaders(
        self, dist: DistInfo, *, bad_file: Path | None = None, datasets: Datasets = None
    ) -> dict[str, EvalLoader]:
        """Build and keep one rank's loader of each test set; `datasets` replace the config's."""
        raise NotImplementedError

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> Dataset:
        """Build a synthetic dataset with samples of the largest training size, for --dry-run and
        benchmarks. Files are written to `folder`; split: "train" or "val"."""
        raise NotImplementedError

    def check_test_classes(self, learned: Sequence[str]) -> None:
        """Warn if the classes of a test set differ from those that the model learned."""

    def check_data(self) -> None:
        """Open the config's datasets. Raises ConfigError or DataError if training would."""
        self.train_loader(DistInfo())
        self.test_loaders(DistInfo())

    # ---- called by the training loop and by evaluation

    def prepare(self, batch: Any) -> Any:
        """Move a training batch to the device, with augmentations that run there."""
        return batch.to(self.device, self.memory_format)

    def split(self, batch: Any, num_parts: int) -> list[Any]:
        """Split a batch into consecutive parts of equal size."""
        samples = len(batch.indices)
        size = samples // num_parts
        message = f"{samples} images do not divide into {num_parts} equal parts"
        assert size * num_parts == samples > 0, message
        parts = [slice(start, start + size) for start in range(0, samples, size)]
        names = ("images", "targets", "indices")
        return [replace(batch, **{n: getattr(batch, n)[part] for n in names}) for part in parts]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a prepared batch; called under autocast."""
        raise NotImplementedError

    def evaluate(
        self, model: nn.Module, between: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, Any]]:
        """Return {test set: metrics}, the same on every rank and for any number of ranks."""
        with evaluating(unwrap(model)) as plain:
            return {name: self.measure(plain, name, between) for name in self.test_sets}

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Return the metrics of one test set, for a model in eval mode.

        Iterate with `vil.engine.evaluation.iter_in_step(self.test_sets[name], between)`.
        """
        raise NotImplementedError

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Format further lines to print, such as a table of classes."""
        return []

    def draw_worst(self, name: str, count: int, folder: Path) -> list[Path]:
        """Draw the `count` images of an evaluated test set with most errors; return the files."""
        raise NotImplementedError

    # ---- called by inference

    def preprocess(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into an input of `run`."""
        raise NotImplementedError

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
        """Compute the model's output for a batch of preprocessed images."""
        raise NotImplementedError

    def postprocess(self, output: Any, metas: Sequence[ImageMeta]) -> list[Any]:
        """Turn the output of `run` into one prediction per image."""
        raise NotImplementedError

    def failed(self, name: str, reason: str) -> Any:
        """Return the prediction for an image that cannot be read."""
        raise NotImplementedError

    def visualize(self, image: Image.Image, prediction: Any) -> Image.Image:
        """Draw a prediction onto a copy of its image."""
        raise NotImplementedError

    # ---- called by the report and by `vil analyze`

    def report(self, model: nn.Module, class_names: Sequence[str], checkpoint: str) -> TaskReport:
        """Evaluate the model on the first test set for the run report.

        class_names: of the model. checkpoint: a description of the model's checkpoint.
        """
        return TaskReport()

    def cost(self, model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
        """Count each part's parameters and MACs for one image; the model may be on meta."""
        raise NotImplementedError


class ConfigTask(Task):
    """A task of this package: settings and data loaders from a config.

    A subclass defines own_arguments(name) -> the DATA.KWARGS that a dataset accepts,
    open_train_set() and open_test_set(name).
    """

    def __init__(self, cfg: CfgNode, device: torch.device, **settings: Any):
        common = dict(device=device, amp_dtype=amp_dtype(cfg), memory_format=memory_format(cfg))
        super().__init__(**common, **settings)
        self.cfg = cfg

    def train_loader(
        self, dist: DistInfo, *, bad_file: Path | None = None, dataset: Dataset | None = None
    ) -> TrainLoader:
        def open_dataset() -> Dataset:
            if dataset is not None:
                return dataset
            data.check_dataset_arguments(self.cfg, self.own_arguments)
            return self.open_train_set()

        return data.build_train_loader(self.cfg, dist, self.device, open_dataset, bad_file)

    @as_config_error
    def test_loaders(
        self, dist: DistInfo, *, bad_file: Path | None = None, datasets: Datasets = None
    ) -> dict[str, EvalLoader]:
        cfg = self.cfg
        if datasets is None:
            data.check_dataset_arguments(cfg, self.own_arguments)
            open_set = self.open_test_set
            self.test_sets = data.build_test_loaders(cfg, dist, self.device, open_set, bad_file)
        else:
            self.test_sets = {
                name: data.build_eval_loader(cfg, dist, self.device, dataset, bad_file)
                for name, dataset in datasets.items()
            }
        return self.test_sets


def format_json_array(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Format a JSON array with one record per line, chunk by chunk."""
    separator = "[\n"
    for record in records:
        yield separator + json.dumps(record)
        separator = ",\n"
    yield "\n]\n"


REQUIRED = ("build_model", "load_weights", "train_loader", "test_loaders", "loss", "measure")


def check_task(task: Any, entry: Entry) -> None:
    """Raise ValueError unless `task` is a subclass of Task with the methods training needs."""
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ValueError(f"task {entry.name!r} must subclass vil.tasks.base.Task, got {task!r}")
    missing = [name for name in REQUIRED if getattr(task, name) is getattr(Task, name)]
    if task.evaluate is not Task.evaluate and "measure" in missing:
        missing.remove("measure")
    if missing:
        raise ValueError(f"task {entry.name!r} ({task.__name__}) must define {', '.join(missing)}")
