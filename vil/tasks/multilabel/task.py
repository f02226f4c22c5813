"""The multilabel task: loss, evaluation with average precision and F1, inference.

Shapes: B images, N images of a test set, K labels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.engine.distributed import broadcast_object, compute_on_main
from vil.engine.loop import Loss, Metric
from vil.tasks.base import ImageMeta
from vil.tasks.image_task import ImageTask, Outputs, draw_lines
from vil.tasks.multilabel.losses import LOSSES
from vil.tasks.multilabel.output_formats import FORMATS, Prediction, describe


class MultilabelTask(ImageTask):
    """Task for models that give each image any number of K labels.

    loss: "bce" or "asymmetric", with loss_options for `losses.py`. label_smoothing: targets 0 and 1
    become s / 2 and 1 - s / 2. positive_weights: factor (K,) of the loss of images that have the
    label. thresholds: (K,), an image has a label if its probability is at least the threshold.
    """

    metric = Metric("map", label="mean average precision", unit="%")
    output_formats = FORMATS

    def __init__(
        self,
        *,
        num_labels: int,
        loss: str = "bce",
        loss_options: Mapping[str, float] | None = None,
        label_smoothing: float = 0.0,
        positive_weights: Tensor | None = None,
        thresholds: Sequence[float] | None = None,
        **common: Any,
    ):
        super().__init__(**common)
        self.criterion = partial(LOSSES[loss], **(loss_options or {}))
        self.label_smoothing, self.positive_weights = label_smoothing, positive_weights
        self.thresholds = np.full(num_labels, 0.5) if thresholds is None else np.array(thresholds)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Compute the training loss, and as a metric the accuracy of all labels at 0.5 in percent.

        The loss of an image is the mean over labels.
        """
        logits, smoothing = model(batch.images), self.label_smoothing
        targets = batch.targets * (1 - smoothing) + smoothing / 2
        weights = self.positive_weights
        weights = None if weights is None else weights.to(self.device)
        losses = self.criterion(logits, targets, weights).mean(dim=-1)
        correct = (logits.detach() > 0) == (batch.targets > 0.5)
        metrics = {"label_accuracy": 100 * correct.float().mean()}
        return self.average_losses(losses, batch, metrics)

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """Return {loss, map, macro_f1, micro_f1, exact, count, per_label} of the test set `name`,
        see `score`."""
        outputs = self.collect_outputs(model, name, between)
        return broadcast_object(None if outputs is None else self.score(outputs))

    def score(self, outputs: Outputs) -> dict[str, Any]:
        """Score logits (N, K) at the task's thresholds.

        Returns {loss, map, macro_f1, micro_f1, exact, count, per_label}. All but loss and count are
        in percent. map is the mean of the average precisions of labels that some image has,
        macro_f1 the mean of their F1. exact is the share of images with exactly the right labels.
        loss is the binary cross entropy. per_label has {ap, f1, count}, with a list of K values
        each; ap and f1 are NaN for a label that no image has.
        """
        from sklearn.metrics import average_precision_score

        truth, probabilities = outputs.targets > 0.5, sigmoid(outputs.values)
        predicted = probabilities >= self.thresholds
        count = truth.sum(axis=0)
        ap = [
            average_precision_score(t, p) if n else np.nan
            for t, p, n in zip(truth.T, probabilities.T, count)
        ]
        hits, wrong = (truth & predicted).sum(axis=0), (truth != predicted).sum(axis=0)
        f1 = np.where(count, f1_score(hits, wrong), np.nan)
        losses = np.logaddexp(0, np.where(truth, -1, 1) * outputs.values.astype(np.float64))
        return {
            "loss": float(losses.mean()),
            "map": 100 * mean_of_finite(ap),
            "macro_f1": 100 * mean_of_finite(f1),
            "micro_f1": 100 * float(f1_score(hits.sum(), wrong.sum())),
            "exact": 100 * float((truth == predicted).all(axis=1).mean()),
            "count": len(truth),
            "per_label": {
                "ap": [100 * float(value) for value in ap],
                "f1": [100 * float(value) for value in f1],
                "count": count.tolist(),
            },
        }

    def format_metrics(self, name: str, metrics: Mapping[str, Any]) -> list[str]:
        """Return a line per label with its average precision, F1 and number of images."""
        names, each = self.test_sets[name].classes, metrics["per_label"]
        rows = zip(names, each["ap"], each["f1"], each["count"])
        return [f"  {label:20} ap {a:6.2f} f1 {b:6.2f} of {n} images" for label, a, b, n in rows]

    def calibrate(self, model: nn.Module) -> dict[str, Any]:
        """Choose the threshold of each label with the highest F1 on the first test set.

        Returns {"thresholds": {label: threshold}}, the same on all ranks.
        """
        name, outputs = self.first_outputs(model)

        def choose() -> dict[str, Any]:
            best = choose_thresholds(outputs.targets > 0.5, sigmoid(outputs.values))
            return {"thresholds": dict(zip(self.test_sets[name].classes, best.tolist()))}

        return compute_on_main(choose)

    def apply_calibration(self, values: Mapping[str, Any]) -> None:
        """Use the thresholds that `calibrate` returned, or 0.5 if `values` is empty."""
        chosen = values.get("thresholds", {})
        names = self.class_names or list(chosen)
        self.thresholds = np.array([chosen[name] if values else 0.5 for name in names])

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Return probabilities (B, K) float32, on the CPU, for B tensors (3, H, W)."""
        return super().run(model, inputs).sigmoid()

    def postprocess(self, output: Tensor, metas: Sequence[ImageMeta]) -> list[Prediction]:
        """Convert probabilities (B, K) to the labels of each image."""
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
    """Return probabilities in float32, as `MultilabelTask.run` computes them."""
    return torch.from_numpy(logits).sigmoid().numpy()


def f1_score(hits: Any, wrong: Any) -> Any:
    """Return F1 = 2 TP / (2 TP + FP + FN), and 0 where this is 0 / 0. hits: number of true
    positives TP. wrong: number of errors FP + FN."""
    return 2 * hits / np.maximum(2 * hits + wrong, 1)


def mean_of_finite(values: Sequence[float]) -> float:
    """Return the mean without NaNs; NaN if there is nothing else."""
    kept = [value for value in values if np.isfinite(value)]
    return float(np.mean(kept)) if kept else float("nan")


def choose_thresholds(truth: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the threshold (K,) of each label whose F1 is the highest.

    truth: (N, K) bool. probabilities: (N, K). A threshold lies halfway between two neighboring
    probabilities. The lowest of several best ones is returned, and 0.5 for a label that no image
    has.
    """
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
        thresholds[label] = (float(sorted_p[last]) + float(below)) / 2
    return thresholds
