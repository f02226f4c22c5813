"""The contract of a task: all that differs between classification, detection and what else may be
learned. Nothing outside of `vil/tasks` asks which task it has.

A task is one folder, or one file of a user's, and one entry in TASKS. Its class is called as
`Task(cfg, device)`: what it reads from the config becomes explicit attributes there. The training
loop, evaluation, inference, the report and the commands then call the methods below.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from vil.builders.cost import CostRow
from vil.data.loader import EvalLoader, TrainLoader
from vil.engine.distributed import DistInfo, unwrap
from vil.engine.evaluation import evaluating
from vil.engine.loop import Loss, Metric
from vil.report.html import Html
from vil.utils.registry import Entry

OutputFormat = Callable[[Iterable[Any], Sequence[str]], Iterator[str]]


class ImageMeta(NamedTuple):
    """Where an image came from, and its size before any transform."""

    name: str
    size: tuple[int, int]  # (height, width) in pixels


class TaskReport(NamedTuple):
    """A task's part of a run's page: (what, value, remark) of its cards, and sections."""

    cards: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[Html] = ()


class Task:
    """Base class of all tasks; a method without a default raises NotImplementedError.

    metric: the metric of the first test set that decides which checkpoint is `best`.
    output_formats: {name: function} of `vil predict --format`, the default first; each turns an
    iterable of predictions and the class names into pieces of text.
    """

    metric: Metric
    output_formats: Mapping[str, OutputFormat] = {}
    class_names: Sequence[str] = ()  # names of the model's classes; set by inference
    columns: Sequence[str] = ()  # metrics of the report's table of evaluations; none: all

    def __init__(
        self,
        *,
        device: torch.device,
        amp_dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        test_sets: Mapping[str, EvalLoader] | None = None,
        results_folder: Path | None = None,
    ):
        """amp_dtype: autocast's precision, None: full. test_sets: what `evaluate` runs over;
        `test_loaders` sets it. results_folder: where `evaluate` writes predictions, if the task
        does."""
        self.device, self.amp_dtype, self.memory_format = device, amp_dtype, memory_format
        self.test_sets = dict(test_sets or {})
        self.results_folder = results_folder

    # ---- built from the config

    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        """Build the network and its head, initialized from SEED; it may hold auxiliary trainable
        parts.

        load_pretrained: with MODEL.PRETRAINED, take an external model's published weights.
        """
        raise NotImplementedError

    def inference_model(self, model: nn.Module) -> nn.Module:
        """Return the model without its auxiliary parts."""
        return model

    def load_weights(self, model: nn.Module, path: Path, *, strict: bool) -> Any:
        """Load a file of weights; return a report of every key.

        strict: nothing may stay as it was initialized. Raises CheckpointError for a file that does
        not fit.
        """
        raise NotImplementedError

    def train_loader(
        self, dist: DistInfo, *, bad_file: Path | None = None, dataset: Dataset | None = None
    ) -> TrainLoader:
        """Build the training loader of one rank; `dataset` replaces that of the config."""
        raise NotImplementedError

    def test_loaders(
        self,
        dist: DistInfo,
        *,
        bad_file: Path | None = None,
        datasets: Mapping[str, Dataset] | None = None,
    ) -> dict[str, EvalLoader]:
        """Build one rank's loader of each test set and keep them for `evaluate`; `datasets` replace
        those of the config."""
        raise NotImplementedError

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> Dataset:
        """Build a data set of synthetic samples, as large as training may see them, for --dry-run
        and benchmarks. Files go to `folder`; split: "train" or "val"."""
        raise NotImplementedError

    def check_test_classes(self, learned: Sequence[str]) -> None:
        """Warn where the classes of a test set are not those that the model learned."""

    def check_data(self) -> None:
        """Open the config's data sets. Raises ConfigError or DataError for what training would
        refuse."""
        self.train_loader(DistInfo())
        self.test_loaders(DistInfo())

    # ---- called by the training loop and by evaluation

    def prepare(self, batch: Any) -> Any:
        """Move a step's batch to the device and change it as it is trained on."""
        return batch.to(self.device, self.memory_format)

    def split(self, batch: Any, num_parts: int) -> list[Any]:
        """Split a batch into parts of as many samples each, in its order."""
        samples = len(batch.indices)
        size, rest = divmod(samples, num_parts)
        assert size > 0, f"{samples} images in {num_parts} parts"
        assert rest == 0, f"{samples} images do not divide into {num_parts} equal parts"
        cuts = [slice(start, start + size) for start in range(0, samples, size)]
        return [
            replace(
                batch,
                images=batch.images[cut],
                targets=batch.targets[cut],
                indices=batch.indices[cut],
            )
            for cut in cuts
        ]

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
        """Return the metrics of one test set; the model is in eval mode.

        Iterate with `vil.engine.evaluation.iter_in_step(self.test_sets[name], between)`.
        """
        raise NotImplementedError

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Lines to print below the metrics of a test set, such as a table of its classes."""
        return []

    def draw_worst(self, name: str, count: int, folder: Path) -> list[Path]:
        """Draw the `count` images of an evaluated test set with the most mistakes; return the
        files."""
        raise NotImplementedError

    # ---- called by inference

    def preprocess(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into what `run` takes."""
        raise NotImplementedError

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
        """Compute the model's output for a batch of preprocessed images."""
        raise NotImplementedError

    def postprocess(self, output: Any, metas: Sequence[ImageMeta]) -> list[Any]:
        """Turn the output of `run` into a prediction per image."""
        raise NotImplementedError

    def failed(self, name: str, reason: str) -> Any:
        """The prediction of an image that cannot be read."""
        raise NotImplementedError

    def visualize(self, image: Image.Image, prediction: Any) -> Image.Image:
        """Draw a prediction into a copy of its image."""
        raise NotImplementedError

    # ---- called by the report and by `vil analyze`

    def report(self, model: nn.Module, class_names: Sequence[str], checkpoint: str) -> TaskReport:
        """Evaluate the model on the first test set for a run's page.

        class_names: of the model. checkpoint: which one the model is, in words.
        """
        return TaskReport()

    def cost(self, model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
        """Parameters and multiply-accumulates of each part, for one image; the model may be on the
        meta device."""
        raise NotImplementedError


REQUIRED = ("build_model", "load_weights", "train_loader", "test_loaders", "loss", "measure")


def check_task(task: Any, entry: Entry) -> None:
    """Raise ValueError unless `task` is a subclass of Task that has what training needs."""
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ValueError(f"task {entry.name!r} must subclass vil.tasks.base.Task, got {task!r}")
    missing = [name for name in REQUIRED if getattr(task, name) is getattr(Task, name)]
    if task.evaluate is not Task.evaluate and "measure" in missing:
        missing.remove("measure")
    if missing:
        raise ValueError(f"task {entry.name!r} ({task.__name__}) must define {', '.join(missing)}")
