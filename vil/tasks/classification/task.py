"""The classification task: loss, evaluation, inference.

Shapes: B images of c channels and H x W pixels, K classes of the model, C classes of a test set.
A `Batch` has `images` (B, c, H, W) and `targets`, either classes (B,) int64 or soft targets (B, K)
float.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.engine.distributed import compute_on_main
from vil.engine.evaluation import autocast, iter_in_step
from vil.engine.loop import Loss
from vil.tasks.base import ImageMeta, make_metric
from vil.tasks.classification import METRICS
from vil.tasks.classification.calibration import fit_temperature
from vil.tasks.classification.losses import LossFunction, takes_weights, widen, xentropy
from vil.tasks.classification.metrics import MAX_RANKED, ClassificationMetrics
from vil.tasks.classification.output_formats import FORMATS, Prediction
from vil.tasks.classification.predictions import BatchPredictions, Predictions, merge
from vil.tasks.image_task import ImageTask, draw_lines, gather_batches
from vil.utils.console import printable
from vil.utils.errors import ConfigError
from vil.utils.lookup import lookup
from vil.utils.metric_format import format_pair


class Scores(NamedTuple):
    """Losses of B images, and whether the predictions for them are correct (top-1 and top-5)."""

    losses: Tensor  # (B,), 0 where `has_loss` is False
    top1: Tensor  # (B,) bool
    top5: Tensor  # (B,) bool
    has_loss: Tensor  # (B,) bool
    predicted: Tensor  # (B,) the top-1 prediction


class ClassificationTask(ImageTask):
    """Task for models that assign one class to each image.

    Args:
        num_classes: number K of the model's classes.
        loss: training loss, a function as in losses.py.
        mix: function that applies mixup or cutmix to a training batch; None: no mixup.
        per_class: whether evaluation also computes metrics of each class.
        class_mapping: {name of a test set with C classes: (K, C) bool}, see `score_by_mapping`.
        top: maximum number of classes per prediction; None: no limit.
        class_weights: (K,) weight of each class in the training loss; None: all weights are 1.
        logit_shifts: (K,) values that are added to the logits in training; None: add nothing.
        threshold: minimum probability of a class in a prediction.
    """

    metric = make_metric(METRICS)
    output_formats = FORMATS
    threshold = 0.0

    def __init__(
        self,
        *,
        num_classes: int,
        loss: LossFunction = xentropy,
        label_smoothing: float = 0.0,
        mix: Callable[[Any], Any] | None = None,
        per_class: bool = False,
        class_mapping: Mapping[str, Tensor] | None = None,
        top: int | None = 5,
        class_weights: Tensor | None = None,
        logit_shifts: Tensor | None = None,
        threshold: float = 0.0,
        **common: Any,
    ):
        super().__init__(**common)
        self.num_classes = num_classes
        self.criterion, self.label_smoothing, self.mix = loss, label_smoothing, mix
        self.per_class = per_class
        self.top, self.threshold = top, threshold
        self.class_weights, self.logit_shifts = map(self.to_device, (class_weights, logit_shifts))
        self.check_weights()
        self.temperature: float | None = None  # see `apply_calibration`
        self.set_class_mapping(class_mapping or {})

    def set_class_mapping(self, class_mapping: Mapping[str, Tensor]) -> None:
        """Set the mappings between the model's K classes and the C classes of test sets.

        class_mapping: {name of a test set: (K, C) bool}, see `score_by_mapping`. Raises ValueError
        for an unknown test set, a wrong dtype or shape, or a mapping without True.
        """
        self.class_mapping = {name: m.to(self.device) for name, m in class_mapping.items()}
        for name, mapping in self.class_mapping.items():
            lookup(self.test_sets, name, "test set with mapped classes")
            fits = mapping.dtype == torch.bool and len(mapping) == self.num_classes
            if not fits or not mapping.any():
                raise ValueError(
                    f"the class mapping of test set {name} must be a bool tensor "
                    f"({self.num_classes}, C) with at least one True, got {mapping.dtype} "
                    f"{tuple(mapping.shape)} with {int(mapping.sum())} True"
                )

    def prepare(self, batch: Batch) -> Batch:
        """Move the batch to the device and apply mixup, if set."""
        batch = super().prepare(batch)
        return self.mix(batch) if self.mix is not None else batch

    def check_weights(self) -> None:
        """Raise ValueError if class or sample weights are set, but not supported.

        Some loss functions support neither kind of weights. Mixup and cutmix do not support sample
        weights.
        """
        if (self.class_weights, self.image_weights) == (None, None):
            return
        if not takes_weights(self.criterion):
            raise ValueError(
                "the loss does not support class weights or sample weights, because it has no "
                "argument `per_image`: use another loss, or remove the weights"
            )
        if self.image_weights is not None and self.mix is not None:
            raise ValueError(
                "mixup and cutmix do not support sample weights: set AUG.MIXUP_PROB to 0, which "
                "disables both"
            )

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the training loss, and the top-1 accuracy in percent as a metric.

        With class weights or sample weights, the loss is the weighted mean over images. An image's
        weight is its sample weight times the weight of its class. For a soft target t, the weight
        of its class is the sum over classes k of t[k] * class_weights[k].
        """
        logits, targets = model(batch.images), batch.targets
        shifted = logits if self.logit_shifts is None else logits + self.logit_shifts.to(logits)
        weights = self.weigh(batch)
        if weights is None:
            loss = Loss(self.criterion(shifted, targets, self.label_smoothing))
        else:
            losses = self.criterion(shifted, targets, self.label_smoothing, per_image=True)
            loss = Loss((weights * losses).sum(), weights.sum())
        if targets.is_floating_point():
            targets = targets.argmax(dim=-1)
        correct = logits.detach().argmax(dim=-1) == targets
        return loss._replace(metrics={"top1": 100 * correct.float().mean()})

    def weigh(self, batch: Batch) -> Tensor | None:
        """Return the weight of each image in the loss, (B,).

        The weight is the product of the image's sample weight and its class weight. Returns None if
        neither sample weights nor class weights are set.
        """
        parts = []
        if self.class_weights is not None:
            table, targets = self.class_weights, batch.targets
            parts.append(targets @ table if targets.is_floating_point() else table[targets])
        if self.image_weights is not None:
            parts.append(self.weights_of(batch))
        return math.prod(parts) if parts else None

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Return the metrics of the test set `name`, see `metric_names`.

        Metrics are in percent, except "loss" (cross entropy without mixup or smoothing) and "count"
        (number of images). If `per_class` is set, "per_class" has the metrics of each class. The
        metrics do not depend on the number of ranks. between: function that is called before each
        batch. Raises DataError if no image can be read.
        """
        predictions = self.collect_predictions(model, name, between)

        def compute() -> dict[str, Any]:
            self.hint = self.hint or self.find_collapse(name, predictions)
            mapping = self.class_mapping.get(name)
            is_mapped = mapping is not None
            metrics = ClassificationMetrics(predictions, self.num_classes, is_mapped=is_mapped)
            values = metrics.averages()
            if self.per_class:
                num_classes = mapping.shape[1] if is_mapped else self.num_classes
                values["per_class"] = metrics.per_class(num_classes)
            return values

        return compute_on_main(compute)

    def find_collapse(self, name: str, predictions: Predictions) -> str:
        """Return a warning if the model predicts the same class for all images of a test set.

        Returns "" if there are several predicted classes, or only one ground-truth class. name:
        name of the test set. predictions: predictions for all of its images.
        """
        predicted, targets = map(np.unique, (predictions.predicted, predictions.targets))
        if len(predicted) > 1 or len(targets) == 1:
            return ""
        label = printable(self.class_label(predicted[0]))
        return (
            f"the model predicts the same class ({label}) for all images of {name}: train longer, "
            "or try another learning rate"
        )

    def collect_predictions(
        self, model: nn.Module, name: str, between: Callable[[], None] = lambda: None
    ) -> Predictions | None:
        """Predict the classes of the images in the test set `name`, and compute their losses.

        The model must be in eval mode. Rank 0 returns the predictions of all ranks, the others
        None. between: function that is called before each batch. Raises DataError, on all ranks, if
        no image can be read.
        """
        batches = []
        for batch in iter_in_step(self.test_sets[name], between):
            indices, batch = batch.indices, batch.to(self.device, self.memory_format)
            with autocast(self.device, self.amp_dtype):
                logits = self.divide_by_temperature(widen(model(batch.images)))
                scores = self.score(name, logits, batch.targets)
            batches.append(self.to_arrays(name, indices, batch.targets, logits, scores))
        gathered = gather_batches(batches, name)
        return merge(gathered) if gathered else None

    def to_arrays(
        self, name: str, indices: Tensor, targets: Tensor, logits: Tensor, scores: Scores
    ) -> BatchPredictions:
        """Copy the predictions for a batch to the CPU, as numpy arrays.

        name: name of the test set. indices (B,): indices of the images in the test set. targets
        (B,): ground-truth classes. logits (B, K). scores: result of `score`.
        """
        mapping, predicted = self.class_mapping.get(name), scores.predicted
        logits = logits.float()
        if mapping is not None:  # unmapped classes are ignored
            logits = logits.masked_fill(~mapping.any(dim=1), -torch.inf)
        probabilities = logits.softmax(dim=-1)
        probability = probabilities.gather(1, predicted[:, None])[:, 0]
        is_ranked = mapping is None and self.num_classes <= MAX_RANKED
        # MPS has no float64
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        columns = (
            indices, targets, predicted, scores.top1, scores.top5, probability,
            scores.losses.to(dtype), scores.has_loss, probabilities if is_ranked else None,
        )  # fmt: skip
        arrays = [None if column is None else column.cpu().numpy() for column in columns]
        return BatchPredictions(arrays, scores.losses.to(dtype).sum().item())

    def compute_outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the logits (B, K) float32 for images on the device.

        The logits are divided by the temperature if the model is calibrated.
        """
        return self.divide_by_temperature(super().compute_outputs(model, images))

    def divide_by_temperature(self, logits: Tensor) -> Tensor:
        return logits if self.temperature is None else logits / self.temperature

    def calibrate(self, model: nn.Module) -> dict[str, Any]:
        """Fit a temperature on the first test set.

        Returns {"temperature": T, "test_set": name of the test set, "images": number of images}.
        Must be called before `apply_calibration`, which applies T to later outputs. Raises
        ConfigError if the test set has other classes than the model.
        """
        name = next(iter(self.test_sets))
        if name in self.class_mapping:
            raise ConfigError(
                f"cannot calibrate on test set {name}, because its classes differ from the "
                "model's: use a test set with the classes of the model"
            )
        assert self.temperature is None, f"temperature {self.temperature} is applied already"
        _, outputs = self.first_outputs(model)
        return compute_on_main(
            lambda: {
                "temperature": fit_temperature(outputs.values, outputs.targets),
                "test_set": name,
                "images": len(outputs.targets),
            }
        )

    def apply_calibration(self, calibration: Mapping[str, Any]) -> None:
        """Divide all later logits by the temperature in `calibration`.

        calibration: result of `calibrate`, or {} to leave the logits unchanged.
        """
        self.temperature = calibration["temperature"] if calibration else None

    def score(self, name: str, logits: Tensor, targets: Tensor) -> Scores:
        """Compute the loss and the correctness of B predictions on the test set `name`.

        logits (B, K). targets (B,): indices of the model's K classes or, if the test set has a
        class mapping, indices of the test set's C classes.
        """
        mapping = self.class_mapping.get(name)
        if mapping is None:
            return score_by_class(logits, targets)
        return score_by_mapping(logits, targets, mapping)

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Return one line of text per class, or [] if `metrics` has no per-class metrics.

        A line has the number of correct predictions, the number of images, and the metrics of the
        class. name: name of the test set. metrics: result of `measure`.
        """
        table, classes = dict(metrics.get("per_class", {})), self.test_sets[name].classes
        if not table:
            return []
        lines = [
            f"  {label:20} {correct}/{count}"
            for label, correct, count in zip(classes, table.pop("right"), table.pop("count"))
        ]
        columns = [[format_pair(name, value) for value in column] for name, column in table.items()]
        return ["  ".join(cells) for cells in zip(lines, *columns)]

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Return class probabilities (B, K) float32, on the CPU, for B inputs (c, H, W)."""
        return super().run(model, inputs).softmax(dim=-1)

    def postprocess(self, output: Tensor, metas: Sequence[ImageMeta]) -> list[Prediction]:
        """Convert class probabilities (B, K) to one prediction per image.

        A prediction has the `top` most probable classes whose probability is at least `threshold`.
        """
        # stable: equal probabilities keep the order of classes on every device
        ranked = output.sort(descending=True, stable=True)
        least = self.threshold
        columns = ranked.indices[:, : self.top].tolist(), ranked.values[:, : self.top].tolist()
        predictions = []
        for meta, indices, probabilities in zip(metas, *columns):
            classes = [(i, p) for i, p in zip(indices, probabilities) if not p < least]
            names = [self.class_label(i) for i, _ in classes]
            predictions.append(Prediction(meta.name, classes, names=names))
        return predictions

    def class_label(self, index: int) -> str:
        """Return the name of a class, or its index as text if the model has no class names."""
        return self.class_names[index] if self.class_names else str(index)

    def visualize(self, image: Image.Image, prediction: Prediction) -> Image.Image:
        """Write the predicted classes and their probabilities onto a copy of the image."""
        pairs = prediction.classes
        return draw_lines(image, [f"{self.class_label(n)} {share:.2f}" for n, share in pairs])

    def failed(self, name: str, reason: str) -> Prediction:
        return Prediction(name, [], reason)


def score_by_class(logits: Tensor, targets: Tensor) -> Scores:
    """Compute the loss of each of B predictions, and whether the prediction is correct.

    logits (B, K). targets (B,): indices of the model's K classes.
    """
    best = top_five(logits)
    hits = best == targets[:, None]
    losses = F.cross_entropy(logits, targets, reduction="none")
    has_loss = torch.ones_like(targets, dtype=torch.bool)
    return Scores(losses, hits[:, 0], hits.any(dim=-1), has_loss, best[:, 0])


def score_by_mapping(logits: Tensor, targets: Tensor, class_mapping: Tensor) -> Scores:
    """Compute losses and correctness on a test set whose classes differ from the model's classes.

    logits (B, K), of the model's K classes. targets (B,): indices of the test set's C classes.
    class_mapping (K, C) bool: True where a class of the model is mapped to a class of the test set.

    Model classes that are mapped to no class are excluded from the softmax. A prediction is correct
    if the predicted class is mapped to the target. The loss is -log of the total probability of all
    model classes that are mapped to the target. If no model class is mapped to the target, the
    prediction is wrong and the image has no loss.
    """
    logits = logits.masked_fill(~class_mapping.any(dim=1), -torch.inf)
    correct = class_mapping.T[targets]  # (B, K)
    has_loss = correct.any(dim=-1)
    correct_logits = logits.masked_fill(~correct, -torch.inf).logsumexp(dim=-1)
    losses = torch.where(has_loss, logits.logsumexp(dim=-1) - correct_logits, 0)
    best = top_five(logits)
    hits = correct.gather(1, best)
    return Scores(losses, hits[:, 0], hits.any(dim=-1), has_loss, best[:, 0])


def top_five(logits: Tensor) -> Tensor:
    """Return the classes with the highest logits, (B, min(5, K)), best first.

    Classes with equal logits are in the order of their indices, as in the output of `vil predict`.
    """
    if logits.dtype != torch.float32:
        return logits.argsort(dim=-1, descending=True, stable=True)[:, :5]
    # one topk of integers, whose order is that of the logits and then of the indices
    logits = torch.where(logits.isnan(), torch.inf, logits + 0.0)  # + 0.0: no negative zero
    bits = logits.view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    index = torch.arange(logits.shape[-1], device=logits.device)
    return (order - index).topk(min(5, logits.shape[-1]), dim=-1).indices
