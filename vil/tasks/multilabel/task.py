"""The multilabel task: loss, evaluation with average precision and F1, inference.

Shapes: B images, N images of a test set, K labels.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.engine.distributed import compute_on_main
from vil.engine.loop import Loss, Metric
from vil.tasks.base import ImageMeta
from vil.tasks.image_task import ImageTask, Outputs, draw_lines
from vil.tasks.metrics import mean, rank, rank_metrics
from vil.tasks.multilabel.losses import LOSSES
from vil.tasks.multilabel.output_formats import FORMATS, Prediction, describe
from vil.utils.errors import DivergedError

MIN_THRESHOLD = 1e-30


class MultilabelTask(ImageTask):
    """Task for models that predict which of K labels an image has.

    Args:
        num_labels: number K of labels.
        loss: "bce" or "asymmetric", the name of a function in losses.py.
        label_smoothing: amount s. The targets 0 and 1 become s / 2 and 1 - s / 2.
        positive_weights: (K,) weight of positive images in the loss of each label; None: 1.
        thresholds: (K,) minimum probability for predicting each label; None: 0.5.
    """

    metric = Metric("map", label="mean average precision", unit="%")
    output_formats = FORMATS

    def __init__(
        self,
        *,
        num_labels: int,
        loss: str = "bce",
        label_smoothing: float = 0.0,
        positive_weights: Tensor | None = None,
        thresholds: Sequence[float] | None = None,
        **common: Any,
    ):
        super().__init__(**common)
        self.criterion = LOSSES[loss]
        self.label_smoothing = label_smoothing
        self.positive_weights = self.to_device(positive_weights)
        self.thresholds = np.full(num_labels, 0.5) if thresholds is None else np.array(thresholds)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the training loss, and the label accuracy in percent as a metric.

        The loss of an image is the mean over labels. The label accuracy is the fraction of correct
        predictions, over all images and labels, with a threshold of 0.5.
        """
        logits, smoothing = model(batch.images), self.label_smoothing
        targets = batch.targets * (1 - smoothing) + smoothing / 2
        losses = self.criterion(logits, targets, self.positive_weights).mean(dim=-1)
        correct = (logits.detach() > 0) == (batch.targets > 0.5)
        metrics = {"label_accuracy": 100 * correct.float().mean()}
        return self.average_losses(losses, batch, metrics)

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Return the metrics of the test set `name`, see `score`."""
        outputs = self.collect_outputs(model, name, between)
        return compute_on_main(lambda: self.score(outputs))

    def score(self, outputs: Outputs) -> dict[str, Any]:
        """Compute the metrics of the model's outputs, with the task's thresholds.

        outputs: logits (N, K) and targets. Returns a dict with these keys, in percent except loss
        and count:

        loss       binary cross entropy
        map        average precision, the mean over the labels that at least one image has
        macro_f1   F1, the mean over the same labels
        micro_f1   F1 over the predictions of all labels together
        exact      fraction of images whose labels are all correct
        count      number of images
        per_label  {"ap": list, "f1": list, "count": list}, with one value per label. ap and f1 are
                   NaN for a label that no image has.

        If a logit is NaN, all metrics except count are NaN.
        """
        truth, probabilities = outputs.targets > 0.5, sigmoid(outputs.values)
        predicted = probabilities >= self.thresholds
        count = truth.sum(axis=0)
        percent = np.nan if np.isnan(outputs.values).any() else 100.0
        ap = [percent / 100 * rank_metrics(rank(p, t))[1] for t, p in zip(truth.T, probabilities.T)]
        hits, wrong = (truth & predicted).sum(axis=0), (truth != predicted).sum(axis=0)
        f1 = percent * np.where(count, f1_score(hits, wrong), np.nan)
        losses = np.logaddexp(0, np.where(truth, -1, 1) * outputs.values.astype(np.float64))
        return {
            "loss": float(losses.mean()),
            "map": mean(np.array(ap)),
            "macro_f1": mean(f1),
            "micro_f1": percent * float(f1_score(hits.sum(), wrong.sum())),
            "exact": percent * float((truth == predicted).all(axis=1).mean()),
            "count": len(truth),
            "per_label": {
                "ap": ap,
                "f1": f1.tolist(),
                "count": count.tolist(),
            },
        }

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Return one line of text per label: its average precision, F1 and number of images.

        name: name of the test set. metrics: result of `measure`.
        """
        names, each = self.test_sets[name].classes, metrics["per_label"]
        rows = zip(names, each["ap"], each["f1"], each["count"])
        return [f"  {label:20} ap {a:6.2f} f1 {b:6.2f} of {n} images" for label, a, b, n in rows]

    def calibrate(self, model: nn.Module) -> dict[str, Any]:
        """For each label, choose the threshold that maximizes the label's F1 on the first test set.

        Returns {"thresholds": {label name: threshold}}, the same on all ranks.
        """
        name, outputs = self.first_outputs(model)

        def choose() -> dict[str, Any]:
            best = choose_thresholds(outputs.targets > 0.5, sigmoid(outputs.values))
            return {"thresholds": dict(zip(self.test_sets[name].classes, best.tolist()))}

        return compute_on_main(choose)

    def apply_calibration(self, values: Mapping[str, Any]) -> None:
        """Set the thresholds. values: result of `calibrate`, or {} to set all of them to 0.5."""
        chosen = values.get("thresholds", {})
        names = self.class_names or list(chosen)
        default = np.full(len(self.thresholds), 0.5)
        self.thresholds = np.array([chosen[name] for name in names]) if values else default

    def for_ensemble(self, tasks: Sequence["MultilabelTask"]) -> "MultilabelTask":
        """Return a copy of this task whose thresholds are the means of those of `tasks`."""
        task = copy(self)
        task.thresholds = np.mean([each.thresholds for each in tasks], axis=0)
        return task

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Return label probabilities (B, K) float32, on the CPU, for B inputs (c, H, W)."""
        return super().run(model, inputs).sigmoid()

    def postprocess(self, output: Tensor, metas: Sequence[ImageMeta]) -> list[Prediction]:
        """Convert label probabilities (B, K) to one prediction per image.

        A prediction has the labels whose probability is at least the threshold of the label.
        """
        chosen = output.numpy() >= self.thresholds
        return [
            Prediction(meta.name, np.flatnonzero(row).tolist(), probabilities)
            for meta, row, probabilities in zip(metas, chosen, output.tolist())
        ]

    def visualize(self, image: Image.Image, prediction: Prediction) -> Image.Image:
        """Write the predicted labels and their probabilities onto a copy of the image."""
        return draw_lines(image, describe(prediction, list(self.class_names)))

    def failed(self, name: str, reason: str) -> Prediction:
        return Prediction(name, [], [], reason)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Compute probabilities in float32, so that they equal those of `MultilabelTask.run`."""
    return torch.from_numpy(logits).sigmoid().numpy()


def f1_score(hits: Any, wrong: Any) -> Any:
    """Return F1 = 2 TP / (2 TP + FP + FN), or 0 where the denominator is 0.

    hits: number of true positives TP. wrong: number of errors FP + FN.
    """
    return 2 * hits / np.maximum(2 * hits + wrong, 1)


def choose_thresholds(truth: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return, for each label, the threshold that maximizes the label's F1, (K,).

    truth (N, K) bool: whether each image has each label. probabilities (N, K): predicted
    probability of each label. If several thresholds have the same F1, the lowest is returned. The
    threshold of a label that no image has is 0.5. Raises DivergedError if a probability is NaN.
    """
    if np.isnan(probabilities).any():
        raise DivergedError(
            "cannot calibrate: some outputs of the model are NaN; use another checkpoint"
        )
    thresholds = np.full(truth.shape[1], 0.5)
    for label in np.flatnonzero(truth.any(axis=0)):
        order = np.argsort(-probabilities[:, label], kind="stable")
        sorted_p, sorted_truth = probabilities[order, label], truth[order, label]
        hits = np.cumsum(sorted_truth)
        wrong = np.arange(1, len(hits) + 1) - hits + hits[-1] - hits
        ends = np.append(sorted_p[1:] != sorted_p[:-1], True)  # not between equal probabilities
        f1 = np.where(ends, f1_score(hits, wrong), -1)
        last = len(f1) - 1 - int(np.argmax(f1[::-1]))
        below = sorted_p[last + 1] if last + 1 < len(sorted_p) else 0.0
        middle = (float(sorted_p[last]) + float(below)) / 2
        thresholds[label] = max(middle, MIN_THRESHOLD)  # a probability may be 0 by underflow
    return thresholds
