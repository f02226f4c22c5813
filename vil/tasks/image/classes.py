"""Classes as targets: each image has one class.

Shapes: B images of a batch, K classes of the model, C classes of a test set. A `Batch` has
`targets`, either classes (B,) int64 or soft targets (B, K) float.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vil.data.batch import Batch
from vil.data.dataset import ImageDataset
from vil.data.loader import EvalLoader
from vil.engine.loop import Loss
from vil.tasks.base import TaskReport
from vil.tasks.image import CLASS_METRICS
from vil.tasks.image.calibration import fit_temperature
from vil.tasks.image.class_metrics import MAX_RANKED, ClassificationMetrics, Predictions
from vil.tasks.image.class_weights import logit_shifts, parse_class_weights
from vil.tasks.image.losses import LossFunction, takes_weights, widen, xentropy
from vil.tasks.image.predictions import (
    ClassPrediction,
    as_csv,
    as_json,
    classes_as_csv,
    classes_as_table,
)
from vil.tasks.image.report import report_classes
from vil.tasks.image.target import BatchColumns, Outputs, Target, TestSet
from vil.utils.console import printable
from vil.utils.errors import ConfigError
from vil.utils.metric_format import format_pair

Mix = Callable[[Batch], Batch]


class Scores(NamedTuple):
    """Losses of B images, and whether the predictions for them are correct (top-1 and top-5)."""

    losses: Tensor  # (B,), 0 where `has_loss` is False
    top1: Tensor  # (B,) bool
    top5: Tensor  # (B,) bool
    has_loss: Tensor  # (B,) bool
    predicted: Tensor  # (B,) the top-1 prediction


class Classes(Target):
    """One class per image. The network's outputs are logits.

    Args:
        num_classes: number K of the model's classes.
        loss: training loss, a function as in losses.py.
        mix: function that applies mixup or cutmix to a training batch; None: no mixup.
        per_class: whether evaluation also computes metrics of each class.
        class_mapping: {name of a test set with C classes: (K, C) bool}, see `score`.
        class_weights: (K,) weight of each class in the training loss; None: all weights are 1.
        logit_shifts: (K,) values that are added to the logits in training; None: add nothing.
        weight_setting: class weights that `read_targets` computes, see `parse_class_weights`.
        logit_adjustment: factor of the logit adjustment that `read_targets` computes.

    top: maximum number of classes per prediction; None: no limit. threshold: minimum probability of
    a class in a prediction.
    """

    target_type = "class"
    metrics = CLASS_METRICS
    prediction = ClassPrediction
    activation = "softmax"
    formats = {
        "table": classes_as_table,
        "json": as_json,
        "csv": classes_as_csv,
        "probabilities": as_csv,
    }

    def __init__(
        self,
        num_classes: int,
        *,
        loss: LossFunction = xentropy,
        label_smoothing: float = 0.0,
        mix: Mix | None = None,
        per_class: bool = False,
        class_mapping: Mapping[str, Tensor] | None = None,
        class_weights: Tensor | None = None,
        logit_shifts: Tensor | None = None,
        weight_setting: Sequence[str] = ("none",),
        logit_adjustment: float = 0.0,
        **common: Any,
    ):
        super().__init__(**common)
        self.num_classes = num_classes
        self.criterion, self.label_smoothing, self.mix = loss, label_smoothing, mix
        self.per_class = per_class
        self.class_weights, self.logit_shifts = map(self.to_device, (class_weights, logit_shifts))
        self.weight_setting, self.logit_adjustment = weight_setting, logit_adjustment
        self.top: int | None = 5
        self.threshold = 0.0
        self.temperature: float | None = None  # see `apply_calibration`
        self.set_class_mapping(class_mapping or {})

    def set_class_mapping(self, class_mapping: Mapping[str, Tensor]) -> None:
        """Set the mappings between the model's K classes and the C classes of test sets.

        class_mapping: {name of a test set: (K, C) bool}, see `score`. Raises ValueError
        for a wrong dtype or shape, or a mapping without True.
        """
        self.class_mapping = {name: m.to(self.device) for name, m in class_mapping.items()}
        for name, mapping in self.class_mapping.items():
            fits = mapping.dtype == torch.bool and len(mapping) == self.num_classes
            if not fits or not mapping.any():
                raise ValueError(
                    f"the class mapping of test set {name} must be a bool tensor "
                    f"({self.num_classes}, C) with at least one True, got {mapping.dtype} "
                    f"{tuple(mapping.shape)} with {int(mapping.sum())} True"
                )

    # ---- training

    def read_targets(self, dataset: ImageDataset) -> dict[str, Any]:
        targets, names = dataset.targets, dataset.classes
        weights = parse_class_weights(self.weight_setting, targets, len(names))
        self.class_weights = self.to_device(weights)
        if self.logit_adjustment:
            shifts = logit_shifts(targets, names, self.logit_adjustment)
            self.logit_shifts = self.to_device(shifts)
        return {}

    def check_weights(self, has_image_weights: bool) -> None:
        """Raise ValueError if class or image weights are set, but not supported.

        Some loss functions support neither kind of weights. Mixup and cutmix do not support image
        weights.
        """
        if self.class_weights is None and not has_image_weights:
            return
        if not takes_weights(self.criterion):
            raise ValueError(
                "the loss does not support class weights or sample weights, because it has no "
                "argument `per_image`: use another loss, or remove the weights"
            )
        if has_image_weights and self.mix is not None:
            raise ValueError(
                "mixup and cutmix do not support sample weights: set AUG.MIXUP_PROB to 0, which "
                "disables both"
            )

    def prepare(self, batch: Batch) -> Batch:
        """Apply mixup, if set."""
        return batch if self.mix is None else self.mix(batch)

    def loss(self, outputs: Tensor, batch: Batch, image_weights: Tensor | None) -> Loss:
        """Compute the training loss, and the top-1 accuracy in percent as a metric.

        With class weights or image weights, the loss is the weighted mean over images. The weight
        is the image weight times the weight of the image's class. For a soft target t, the weight
        of its class is the sum over classes k of t[k] * class_weights[k].
        """
        logits, targets = outputs, batch.targets
        shifted = logits if self.logit_shifts is None else logits + self.logit_shifts.to(logits)
        parts = []
        if self.class_weights is not None:
            table = self.class_weights
            parts.append(targets @ table if targets.is_floating_point() else table[targets])
        if image_weights is not None:
            parts.append(image_weights)
        if parts:
            weights = math.prod(parts)
            losses = self.criterion(shifted, targets, self.label_smoothing, per_image=True)
            loss = Loss((weights * losses).sum(), weights.sum())
        else:
            loss = Loss(self.criterion(shifted, targets, self.label_smoothing))
        if targets.is_floating_point():
            targets = targets.argmax(dim=-1)
        correct = logits.detach().argmax(dim=-1) == targets
        return loss._replace(metrics={"top1": 100 * correct.float().mean()})

    # ---- evaluation

    def decode(self, outputs: Tensor) -> Tensor:
        """Divide the logits by the temperature if the model is calibrated."""
        return outputs if self.temperature is None else outputs / self.temperature

    def evaluate_batch(self, name: str, outputs: Tensor, batch: Batch) -> BatchColumns:
        """Return the fields of `Predictions` for a batch, from `indices` to `probabilities`."""
        logits, mapping = self.decode(widen(outputs)), self.class_mapping.get(name)
        if mapping is not None:  # unmapped classes are ignored
            logits = logits.masked_fill(~mapping.any(dim=1), -torch.inf)
        scores = score(logits, batch.targets, mapping)
        probabilities = logits.float().softmax(dim=-1)
        probability = probabilities.gather(1, scores.predicted[:, None])[:, 0]
        is_ranked = mapping is None and self.num_classes <= MAX_RANKED
        # MPS has no float64
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        losses = scores.losses.to(dtype)
        columns = (
            batch.indices, batch.targets, scores.predicted, scores.top1, scores.top5, probability,
            losses, scores.has_loss, probabilities if is_ranked else None,
        )  # fmt: skip
        arrays = [None if column is None else column.cpu().numpy() for column in columns]
        return BatchColumns(arrays, losses.sum().item())

    def gather(self, merged: BatchColumns) -> Predictions:
        return Predictions(*merged.columns, loss_sum=merged.loss_sum)

    def measure(self, name: str, results: Predictions) -> dict[str, Any]:
        """Return the metrics of the test set `name`, see `metric_names`.

        Metrics are in percent, except "loss" (cross entropy without mixup or smoothing) and "count"
        (number of images). If `per_class` is set, "per_class" has the metrics of each class.
        """
        mapping = self.class_mapping.get(name)
        is_mapped = mapping is not None
        metrics = ClassificationMetrics(results, self.num_classes, is_mapped=is_mapped)
        values = metrics.averages()
        if self.per_class:
            num_classes = mapping.shape[1] if is_mapped else self.num_classes
            values["per_class"] = metrics.per_class(num_classes)
        return values

    def find_problem(self, name: str, results: Predictions, label: Callable[[int], str]) -> str:
        """Return a warning if the model predicts the same class for all images of a test set.

        Returns "" if there are several predicted classes, or only one ground-truth class.
        """
        predicted, targets = map(np.unique, (results.predicted, results.targets))
        if len(predicted) > 1 or len(targets) == 1:
            return ""
        return (
            f"the model predicts the same class ({printable(label(predicted[0]))}) for all images "
            f"of {name}: train longer, or try another learning rate"
        )

    def format_metrics(self, classes: Sequence[str], metrics: Mapping[str, Any]) -> list[str]:
        """Return one line of text per class, or [] if `metrics` has no per-class metrics.

        A line has the number of correct predictions, the number of images, and the metrics of the
        class.
        """
        table = dict(metrics.get("per_class", {}))
        if not table:
            return []
        lines = [
            f"  {printable(label):20} {correct}/{count}"
            for label, correct, count in zip(classes, table.pop("right"), table.pop("count"))
        ]
        columns = [[format_pair(name, value) for value in column] for name, column in table.items()]
        return ["  ".join(cells) for cells in zip(lines, *columns)]

    def calibrate(self, name: str, loader: EvalLoader, outputs: Outputs) -> dict[str, Any]:
        """Fit a temperature to the outputs on the test set `name`.

        Returns {"temperature": T, "test_set": name of the test set, "images": number of images}.
        Must be called before `apply_calibration`, which applies T to later outputs. Raises
        ConfigError if the test set has other classes than the model.
        """
        if name in self.class_mapping:
            raise ConfigError(
                f"cannot calibrate on test set {name}, because its classes differ from the "
                "model's: use a test set with the classes of the model"
            )
        assert self.temperature is None, f"temperature {self.temperature} is applied already"
        temperature = fit_temperature(outputs.values, outputs.targets)
        return {"temperature": temperature, "test_set": name, "images": len(outputs.targets)}

    def apply_calibration(
        self, calibration: Mapping[str, Any], class_names: Sequence[str] = ()
    ) -> None:
        """Divide all later logits by the temperature in `calibration`.

        calibration: result of `calibrate`, or {} to leave the logits unchanged.
        """
        self.temperature = calibration["temperature"] if calibration else None

    def report(
        self, results: Predictions, test_set: TestSet, class_names: Sequence[str], checkpoint: str
    ) -> TaskReport:
        is_mapped = test_set.name in self.class_mapping
        names = list(class_names) if is_mapped else test_set.classes
        options = dict(is_mapped=is_mapped, temperature=self.temperature)
        return report_classes(results, test_set, names, checkpoint, **options)

    # ---- inference

    def activate(self, outputs: Tensor) -> Tensor:
        """Convert logits (B, K) to probabilities."""
        return outputs.softmax(dim=-1)

    def predict(
        self, values: Tensor, files: Sequence[str], label: Callable[[int], str]
    ) -> list[ClassPrediction]:
        """Convert class probabilities (B, K) to one prediction per image.

        A prediction has the `top` most probable classes whose probability is at least `threshold`.
        """
        # stable: equal probabilities keep the order of classes on every device
        ranked = values.sort(descending=True, stable=True)
        columns = ranked.indices[:, : self.top].tolist(), ranked.values[:, : self.top].tolist()
        predictions = []
        for file, indices, probabilities in zip(files, *columns):
            pairs = zip(indices, probabilities)
            classes = [(i, p) for i, p in pairs if not p < self.threshold]
            names = [label(i) for i, _ in classes]
            predictions.append(ClassPrediction(file, classes=classes, names=names))
        return predictions

    def describe(self, prediction: ClassPrediction, label: Callable[[int], str]) -> list[str]:
        return [f"{label(index)} {share:.2f}" for index, share in prediction.classes]

    def caption(self, prediction: ClassPrediction, label: Callable[[int], str]) -> str:
        index, share = prediction.classes[0]
        return f"class {label(index)}, {share:.1%}"


def score(logits: Tensor, targets: Tensor, class_mapping: Tensor | None = None) -> Scores:
    """Compute the losses of B predictions, and whether each prediction is correct.

    logits (B, K), of the model's K classes. targets (B,): indices of the test set's C classes.
    class_mapping (K, C) bool: True where a class of the model is mapped to a class of the test set;
    None: the test set has the model's classes. Logits of model classes that are mapped to no class
    must be -inf.

    With a mapping, a prediction is correct if the predicted class is mapped to the target. The loss
    is -log of the total probability of all model classes that are mapped to the target. If no model
    class is mapped to the target, the prediction is wrong and the image has no loss.
    """
    # stable: classes with equal logits are in the order of their indices, as in `vil predict`
    best = logits.argsort(dim=-1, descending=True, stable=True)[:, :5]
    if class_mapping is None:
        hits = best == targets[:, None]
        losses = F.cross_entropy(logits, targets, reduction="none")
        has_loss = torch.ones_like(targets, dtype=torch.bool)
    else:
        correct = class_mapping.T[targets]  # (B, K)
        hits, has_loss = correct.gather(1, best), correct.any(dim=-1)
        correct_logits = logits.masked_fill(~correct, -torch.inf).logsumexp(dim=-1)
        losses = torch.where(has_loss, logits.logsumexp(dim=-1) - correct_logits, 0)
    return Scores(losses, hits[:, 0], hits.any(dim=-1), has_loss, best[:, 0])
