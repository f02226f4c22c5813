"""The classification task: loss, evaluation with top-1 and top-5 accuracy, inference.

Shapes: B images, K classes of the model, C classes of a test set. A `Batch` has `images`
(B, c, H, W) and `targets`, either classes (B,) int64 or soft targets (B, K) float.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.engine.distributed import all_reduce_sum
from vil.engine.evaluation import autocast, iter_in_step
from vil.engine.loop import Loss, Metric
from vil.tasks.base import ImageMeta
from vil.tasks.classification.losses import LossFunction, xentropy
from vil.tasks.classification.output_formats import FORMATS, Prediction
from vil.tasks.image_task import ImageTask
from vil.utils.errors import DataError
from vil.utils.image_text import draw_text, enlarge, font_for
from vil.utils.lookup import lookup

LABEL_COLOR = (0, 0, 0)  # background of the predicted classes in visualizations


class Scores(NamedTuple):
    """The loss of each of B images, and whether the top-1 and top-5 predictions are correct."""

    losses: Tensor  # (B,), 0 where `has_loss` is False
    top1: Tensor  # (B,) bool
    top5: Tensor  # (B,) bool
    has_loss: Tensor  # (B,) bool


class ClassificationTask(ImageTask):
    """Task for models that assign one class to each image.

    loss: a loss of losses.py. mix: function that applies mixup to a training batch and returns a
    batch with soft targets. per_class: also count correct predictions per class in evaluation.
    class_mapping: {name of a test set: bool (K, C)}, which of the K model classes and C test
    classes mean the same, see `score_by_mapping`. top: number of classes per prediction; None for
    all.
    """

    metric = Metric("top1", label="top-1", unit="%")
    output_formats = FORMATS

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
        **common: Any,
    ):
        super().__init__(**common)
        self.num_classes = num_classes
        self.criterion, self.label_smoothing, self.mix = loss, label_smoothing, mix
        self.per_class = per_class
        self.top = top
        self.set_class_mapping(class_mapping or {})

    def set_class_mapping(self, class_mapping: Mapping[str, Tensor]) -> None:
        """Set the mappings between the K model classes and the C classes of test sets.

        class_mapping: {name of a test set: bool (K, C)}, see `score_by_mapping`. Raises ValueError
        for an unknown test set, a wrong shape, or a mapping without any True.
        """
        self.class_mapping = {name: m.to(self.device) for name, m in class_mapping.items()}
        for name, mapping in self.class_mapping.items():
            lookup(self.test_sets, name, "test set with mapped classes")
            fits = mapping.dtype == torch.bool and len(mapping) == self.num_classes
            if not fits or not mapping.any():
                raise ValueError(
                    f"the class mapping of {name} must be booleans ({self.num_classes}, C) with at "
                    f"least one true, given {mapping.dtype} {tuple(mapping.shape)} with "
                    f"{int(mapping.sum())} true"
                )

    def prepare(self, batch: Batch) -> Batch:
        """Move the batch to the device and apply mixup, if set."""
        batch = super().prepare(batch)
        return self.mix(batch) if self.mix is not None else batch

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the training loss, and top-1 accuracy in percent as a metric."""
        logits, targets = model(batch.images), batch.targets
        loss = self.criterion(logits, targets, self.label_smoothing)
        if targets.is_floating_point():
            targets = targets.argmax(dim=-1)
        correct = logits.detach().argmax(dim=-1) == targets
        return Loss(loss, metrics={"top1": 100 * correct.float().mean()})

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Return {loss, top1, top5, count} of the test set `name`.

        top1 and top5 are accuracies in percent, and count is the number of images.

        If `per_class` is set, also returns per_class: {right, count}, the numbers of correct
        predictions and of images for each class. The loss is the cross entropy without mixup or
        smoothing, averaged over images. The losses are summed in float64, so that the result does
        not depend on the batch size or the number of ranks. Raises DataError if no image can be
        read.
        """
        mapping = self.class_mapping.get(name)
        num_classes = self.num_classes if mapping is None else mapping.shape[1]
        # MPS has no float64
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        integers = dict(dtype=torch.int64, device=self.device)
        loss_sum = torch.zeros((), dtype=dtype, device=self.device)
        counts = torch.zeros(4, **integers)  # images, top-1, top-5, images with a loss
        table = torch.zeros(2, num_classes, **integers)
        for batch in iter_in_step(self.test_sets[name], between):
            batch = batch.to(self.device, self.memory_format)
            with autocast(self.device, self.amp_dtype):
                scores = self.score(name, model(batch.images), batch.targets)
            loss_sum += scores.losses.to(dtype).sum()
            images = torch.ones_like(scores.top1)
            hits = torch.stack([images, scores.top1, scores.top5, scores.has_loss]).long()
            counts += hits.sum(dim=-1)
            if self.per_class:
                table[0].index_add_(0, batch.targets, hits[1])
                table[1].index_add_(0, batch.targets, hits[0])
        images, top1, top5, with_loss = all_reduce_sum(counts).tolist()
        if images == 0:
            raise DataError(f"the test set {name} has no readable image, so it cannot be evaluated")
        metrics: dict[str, Any] = {
            "loss": all_reduce_sum(loss_sum).item() / with_loss if with_loss else math.nan,
            "top1": 100 * top1 / images,
            "top5": 100 * top5 / images,
            "count": images,
        }
        if self.per_class:
            correct_per_class, per_class = all_reduce_sum(table).tolist()
            metrics["per_class"] = {"right": correct_per_class, "count": per_class}
        return metrics

    def score(self, name: str, logits: Tensor, targets: Tensor) -> Scores:
        """Score logits (B, K) against targets (B,) of the test set `name`.

        The targets are indices of the K model classes or, if the test set has a class mapping, of
        the classes of the test set.
        """
        mapping = self.class_mapping.get(name)
        if mapping is None:
            return score_by_class(logits, targets)
        return score_by_mapping(logits, targets, mapping)

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Return a line per class with its correct predictions, or [] if they were not counted."""
        table, classes = metrics.get("per_class"), self.test_sets[name].classes
        rows = zip(classes, table["right"], table["count"]) if table else ()
        return [f"  {label:20} {correct}/{count}" for label, correct, count in rows]

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Return class probabilities (B, K) float32, on the CPU, for B tensors (c, H, W)."""
        return super().run(model, inputs).softmax(dim=-1)

    def postprocess(self, output: Tensor, metas: Sequence[ImageMeta]) -> list[Prediction]:
        """Convert class probabilities (B, K) to the `top` most probable classes of each image."""
        # stable: equal probabilities keep the order of classes on every device
        ranked = output.sort(descending=True, stable=True)
        columns = ranked.indices[:, : self.top].tolist(), ranked.values[:, : self.top].tolist()
        return [
            Prediction(meta.name, list(zip(indices, probabilities)))
            for meta, indices, probabilities in zip(metas, *columns)
        ]

    def visualize(self, image: Image.Image, prediction: Prediction) -> Image.Image:
        """Write the predicted classes and their probabilities onto a copy of the image."""
        canvas, _ = enlarge(image)
        pen, font, y = ImageDraw.Draw(canvas), font_for(canvas), 0
        for number, probability in prediction.classes:
            text = f"{self.class_names[number]} {probability:.2f}"
            y += draw_text(pen, 0, y, text, LABEL_COLOR, font)
        return canvas

    def failed(self, name: str, reason: str) -> Prediction:
        return Prediction(name, [], reason)


def score_by_class(logits: Tensor, targets: Tensor) -> Scores:
    """Score logits (B, K) against targets (B,) that are indices of the model's K classes."""
    hits = top_five(logits) == targets[:, None]
    losses = F.cross_entropy(logits, targets, reduction="none")
    return Scores(losses, hits[:, 0], hits.any(dim=-1), torch.ones_like(targets, dtype=torch.bool))


def score_by_mapping(logits: Tensor, targets: Tensor, class_mapping: Tensor) -> Scores:
    """Score logits (B, K) against targets (B,) of a test set with C classes of its own.

    class_mapping (K, C) bool: True where a class of the model means the same as a class of the
    test set. Model classes without any True are ignored: the softmax is over the other classes.
    A prediction is correct if the predicted class is mapped to the image's class. The loss is
    -log p, where p is the total probability of the model classes mapped to the image's class.
    If no model class is mapped to the image's class, the image counts as wrong and has no loss.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.masked_fill(~class_mapping.any(dim=1), -torch.inf)
    correct = class_mapping.T[targets]  # (B, K)
    has_loss = correct.any(dim=-1)
    correct_logits = logits.masked_fill(~correct, -torch.inf).logsumexp(dim=-1)
    losses = torch.where(has_loss, logits.logsumexp(dim=-1) - correct_logits, 0)
    hits = correct.gather(1, top_five(logits))
    return Scores(losses, hits[:, 0], hits.any(dim=-1), has_loss)


def top_five(logits: Tensor) -> Tensor:
    """Return the classes with the highest logits, (B, min(5, K)), best first."""
    return logits.topk(min(5, logits.shape[-1]), dim=-1).indices
