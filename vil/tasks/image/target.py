"""What a kind of target (classes, labels, numbers) defines for the task.

Shapes: B images of a batch, N images of a test set, K outputs of the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.data.dataset import ImageDataset
from vil.engine.loop import Loss
from vil.tasks.base import Metrics, OutputFormat, TaskReport
from vil.tasks.image.predictions import Prediction


class BatchColumns(NamedTuple):
    """What is kept of an evaluated batch: arrays with one row per image, the first of which has the
    indices of the images in the test set, and the sum of the losses of the images."""

    columns: list[np.ndarray | None]
    loss_sum: float = 0.0


def merge(batches: Iterable[BatchColumns]) -> BatchColumns:
    """Merge the columns of batches, and sort them by the images' indices in the test set.

    The result, including the rounding of the sum of losses, does not depend on the order of
    `batches`.
    """
    ordered = sorted(batches, key=lambda batch: batch.columns[0][0])  # by the first image
    columns = [
        None if parts[0] is None else np.concatenate(parts)
        for parts in zip(*(batch.columns for batch in ordered))
    ]
    total = 0.0
    for batch in ordered:
        total += batch.loss_sum
    order = np.argsort(columns[0], kind="stable")
    return BatchColumns([c if c is None else c[order] for c in columns], total)


class Outputs(NamedTuple):
    """The model's outputs (`values`) and the targets for N images of a test set, in the order of
    the set. `indices` has the index of each image in the set."""

    indices: np.ndarray  # (N,) int64: index of the image in the test set
    targets: np.ndarray  # (N,) or (N, K), see `ImageDataset`
    values: np.ndarray  # (N, K) float32, or float64 for numbers


class TestSet(NamedTuple):
    """A test set in a report. classes: its class names. dataset: reads its images."""

    name: str
    classes: Sequence[str]
    dataset: ImageDataset


class Target:
    """Base class of the kinds of target: classes, labels, numbers.

    target_type: type of the targets of a dataset, see `ImageDataset`. metrics: {name: (label, unit,
    higher is better)}, the default first. formats: {name: output format of `vil predict`}.
    prediction: class of the predictions. device: of the constants in the loss. output_name: name of
    the outputs of an exported model. activation: function that converts the outputs of an exported
    model to predicted values: "softmax", "sigmoid" or "none".

    A kind of target that can be calibrated also defines `calibrate(name, loader, outputs)`, which
    returns the calibration that is fitted to the outputs on the test set `name`, and
    `apply_calibration(calibration, class_names)`.
    """

    target_type: ClassVar[str]
    metrics: ClassVar[Metrics]
    formats: ClassVar[Mapping[str, OutputFormat]]
    prediction: ClassVar[type[Prediction]]
    output_name: ClassVar[str] = "logits"
    activation: ClassVar[str]

    def __init__(self, device: torch.device = torch.device("cpu")):  # noqa: B008
        self.device = device

    def to_device(self, constant: Tensor | None) -> Tensor | None:
        """Copy a constant of the loss to the device, once, because a copy makes the host wait."""
        return None if constant is None else constant.to(self.device)

    # ---- training

    def read_targets(self, dataset: ImageDataset) -> dict[str, Any]:
        """Compute what depends on the targets of the training set, such as class weights.

        Returns {config key: value} of config keys whose values were computed.
        """
        return {}

    def check_weights(self, has_image_weights: bool) -> None:
        """Raise ValueError if the loss does not support weights of images, and there are any."""

    def prepare(self, batch: Batch) -> Batch:
        """Apply augmentations to a training batch that is on the device."""
        return batch

    def prepare_test(self, batch: Batch) -> Batch:
        """Change a batch of a test set that is on the device, before the network sees it."""
        return batch

    def loss(self, outputs: Tensor, batch: Batch, image_weights: Tensor | None) -> Loss:
        """Compute the training loss of the network's outputs (B, K), and metrics for the log.

        image_weights (B,): weight of each image in the mean over images; None: all weights are 1.
        """
        raise NotImplementedError

    # ---- evaluation

    def decode(self, outputs: Tensor) -> Tensor:
        """Convert the network's outputs (B, K) to calibrated or unnormalized ones."""
        return outputs

    def evaluate_batch(self, name: str, outputs: Tensor, batch: Batch) -> BatchColumns:
        """Return what `measure` needs of a batch of the test set `name`. outputs: the network's
        outputs (B, K). batch: on the device. Called in the context of autocast."""
        columns = (batch.indices, batch.targets, self.decode(outputs.float()))
        return BatchColumns([column.cpu().numpy() for column in columns])

    def gather(self, merged: BatchColumns) -> Any:
        """Convert the merged results of `evaluate_batch` to the argument of `measure`."""
        return Outputs(*merged.columns)

    def measure(self, name: str, results: Any) -> dict[str, Any]:
        """Return the metrics of the test set `name`. results: see `gather`."""
        raise NotImplementedError

    def find_problem(self, name: str, results: Any, label: Callable[[int], str]) -> str:
        """Return a warning about the results on the test set `name`, or "". label: function that
        returns the name of a class."""
        return ""

    def format_metrics(self, classes: Sequence[str], metrics: Mapping[str, Any]) -> list[str]:
        """Return additional lines of text about the metrics of a test set, see
        `Task.format_metrics`. classes: names of the test set's classes."""
        return []

    def report(
        self, results: Any, test_set: TestSet, class_names: Sequence[str], checkpoint: str
    ) -> TaskReport:
        """Return cards and sections of the run report. results: see `gather`. class_names: of the
        model. checkpoint: description of the checkpoint, which is shown on a card."""
        raise NotImplementedError

    # ---- inference

    def activate(self, outputs: Tensor) -> Tensor:
        """Convert decoded outputs (B, K) to what is averaged in an ensemble, such as
        probabilities."""
        return outputs

    def average(self, targets: Sequence["Target"]) -> "Target":
        """Return the kind of target of an ensemble. targets: those of its models, `self` first."""
        return self

    def predict(
        self, values: Tensor, files: Sequence[str], label: Callable[[int], str]
    ) -> list[Prediction]:
        """Convert activated outputs (B, K) to one prediction per image. label: see
        `find_problem`."""
        raise NotImplementedError

    def describe(self, prediction: Any, label: Callable[[int], str]) -> list[str]:
        """Return lines of text to draw a prediction onto its image. label: see `find_problem`."""
        raise NotImplementedError

    def caption(self, prediction: Any, label: Callable[[int], str]) -> str:
        """Describe a prediction in one line. label: see `find_problem`."""
        return ", ".join(self.describe(prediction, label)) or "none"

    # ---- export

    def for_export(self, model: nn.Module) -> nn.Module:
        """Return the model with outputs as the users of an exported file expect them."""
        return model

    def encode(self, outputs: Tensor) -> Tensor:
        """Convert the outputs of an exported model to those of the network."""
        return outputs


def mean_loss(losses: Tensor, image_weights: Tensor | None, metrics: Mapping[str, Tensor]) -> Loss:
    """Return the mean of the losses (B,) of images, weighted by `image_weights` (B,).

    metrics: metrics for the training log, which are stored in the returned `Loss`.
    """
    if image_weights is None:
        return Loss(losses.mean(), metrics=metrics)
    return Loss((image_weights * losses).sum(), image_weights.sum(), metrics)
