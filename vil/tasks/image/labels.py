"""Labels as targets: each image has any number of K labels.

Shapes: B images of a batch, N images of a test set, K labels.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vil.data.batch import Batch
from vil.data.dataset import ImageDataset
from vil.data.loader import EvalLoader
from vil.engine.loop import Loss
from vil.tasks.base import TaskReport
from vil.tasks.image import LABEL_METRICS
from vil.tasks.image.calibration import choose_thresholds, f1_score
from vil.tasks.image.class_weights import parse_class_weights
from vil.tasks.image.losses import LABEL_LOSSES
from vil.tasks.image.predictions import LabelPrediction, as_csv, as_json, as_table
from vil.tasks.image.report import ReportTable, render_report
from vil.tasks.image.target import Outputs, Target, TestSet, mean_loss
from vil.tasks.metrics import mean, rank, rank_metrics
from vil.utils.plural import plural

MOST_LABELS = 100  # rows of the report's table


class Labels(Target):
    """Any number of K labels per image. The network's outputs are logits.

    Args:
        num_labels: number K of labels.
        loss: "bce" or "asymmetric", the name of a function in LABEL_LOSSES.
        label_smoothing: amount s. The targets 0 and 1 become s / 2 and 1 - s / 2.
        thresholds: (K,) minimum probability for predicting each label; None: 0.5.
        weight_setting: weights of positive images in the loss of each label, which `read_targets`
            computes, see `parse_class_weights`.
    """

    target_type = "labels"
    metrics = LABEL_METRICS
    prediction = LabelPrediction
    activation = "sigmoid"
    formats = {
        "table": partial(as_table, columns=("labels",)),
        "json": as_json,
        "csv": as_csv,
        "probabilities": as_csv,
    }

    def __init__(
        self,
        num_labels: int,
        *,
        loss: str = "bce",
        label_smoothing: float = 0.0,
        thresholds: Sequence[float] | None = None,
        weight_setting: Sequence[str] = ("none",),
        **common: Any,
    ):
        super().__init__(**common)
        self.criterion = LABEL_LOSSES[loss]
        self.label_smoothing, self.weight_setting = label_smoothing, weight_setting
        self.positive_weights: Tensor | None = None
        self.thresholds = np.full(num_labels, 0.5) if thresholds is None else np.array(thresholds)

    def read_targets(self, dataset: ImageDataset) -> dict[str, Any]:
        count = len(dataset.classes)
        weights = parse_class_weights(self.weight_setting, dataset.targets, count)
        self.positive_weights = self.to_device(weights)
        return {}

    def loss(self, outputs: Tensor, batch: Batch, image_weights: Tensor | None) -> Loss:
        """Compute the training loss, and the label accuracy in percent as a metric.

        The loss of an image is the mean over labels. The label accuracy is the fraction of correct
        predictions, over all images and labels, with a threshold of 0.5.
        """
        smoothing = self.label_smoothing
        targets = batch.targets * (1 - smoothing) + smoothing / 2
        losses = self.criterion(outputs, targets, self.positive_weights).mean(dim=-1)
        correct = (outputs.detach() > 0) == (batch.targets > 0.5)
        return mean_loss(losses, image_weights, {"label_accuracy": 100 * correct.float().mean()})

    def measure(self, name: str, results: Outputs) -> dict[str, Any]:
        """Compute the metrics of the model's outputs, with the thresholds.

        results: logits (N, K) and targets. Returns a dict with these keys, in percent except loss
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
        truth, probabilities = results.targets > 0.5, sigmoid(results.values)
        predicted = probabilities >= self.thresholds
        count = truth.sum(axis=0)
        percent = np.nan if np.isnan(results.values).any() else 100.0
        ap = [percent / 100 * rank_metrics(rank(p, t))[1] for t, p in zip(truth.T, probabilities.T)]
        hits, wrong = (truth & predicted).sum(axis=0), (truth != predicted).sum(axis=0)
        f1 = percent * np.where(count, f1_score(hits, wrong), np.nan)
        losses = np.logaddexp(0, np.where(truth, -1, 1) * results.values.astype(np.float64))
        return {
            "loss": float(losses.mean()),
            "map": mean(np.array(ap)),
            "macro_f1": mean(f1),
            "micro_f1": percent * float(f1_score(hits.sum(), wrong.sum())),
            "exact": percent * float((truth == predicted).all(axis=1).mean()),
            "count": len(truth),
            "per_label": {"ap": ap, "f1": f1.tolist(), "count": count.tolist()},
        }

    def format_metrics(self, classes: Sequence[str], metrics: Mapping[str, Any]) -> list[str]:
        """Return one line of text per label: its average precision, F1 and number of images."""
        each = metrics["per_label"]
        rows = zip(classes, each["ap"], each["f1"], each["count"])
        return [
            f"  {label:20} ap {a:6.2f} f1 {b:6.2f} of {plural(n, 'image')}"
            for label, a, b, n in rows
        ]

    def calibrate(self, name: str, loader: EvalLoader, outputs: Outputs) -> dict[str, Any]:
        """For each label, choose the threshold that maximizes the label's F1.

        Returns {"thresholds": {label name: threshold}}.
        """
        best = choose_thresholds(outputs.targets > 0.5, sigmoid(outputs.values))
        return {"thresholds": dict(zip(loader.classes, best.tolist()))}

    def apply_calibration(
        self, calibration: Mapping[str, Any], class_names: Sequence[str] = ()
    ) -> None:
        """Set the thresholds. calibration: result of `calibrate`, or {} to set all of them to 0.5.
        class_names: names of the labels, by default those in `calibration`."""
        chosen = calibration.get("thresholds", {})
        names = class_names or list(chosen)
        default = np.full(len(self.thresholds), 0.5)
        self.thresholds = np.array([chosen[name] for name in names]) if calibration else default

    def report(
        self, results: Outputs, test_set: TestSet, class_names: Sequence[str], checkpoint: str
    ) -> TaskReport:
        """Return cards, a table of labels, and the images with the most errors."""
        metrics = self.measure(test_set.name, results)
        remark = f"on {test_set.name}, {metrics['count']:,} images"
        cards = [
            ("Mean average precision", f"{metrics['map']:.2f}%", checkpoint),
            ("Macro F1", f"{metrics['macro_f1']:.2f}%", remark),
            ("Images with all labels correct", f"{metrics['exact']:.2f}%", remark),
        ]
        each = metrics["per_label"]
        order = sorted(range(len(class_names)), key=lambda i: np.nan_to_num(each["ap"][i], nan=101))
        rows = [
            (
                class_names[i],
                f"{each['count'][i]:,}",
                f"{each['ap'][i]:.2f}",
                f"{each['f1'][i]:.2f}",
                f"{self.thresholds[i]:.3f}",
            )
            for i in order[:MOST_LABELS]
        ]
        caption = f"Labels on {test_set.name}, the lowest average precision first"
        columns = ("label", "images", "average precision %", "F1 %", "threshold")
        truth, probabilities = results.targets > 0.5, sigmoid(results.values)
        predicted = probabilities >= self.thresholds
        losses = np.logaddexp(0, np.where(truth, -1, 1) * results.values).mean(axis=1)
        worst = np.lexsort((-losses, -(predicted != truth).sum(axis=1)))

        def names_of(chosen: np.ndarray) -> str:
            return ", ".join(class_names[i] for i in np.flatnonzero(chosen)) or "none"

        def describe(i: int) -> list[str]:
            return [f"true: {names_of(truth[i])}", f"predicted: {names_of(predicted[i])}"]

        table = ReportTable(caption, columns, rows)
        images = ("Images with the most errors", results.indices, worst, describe)
        return TaskReport(cards, [render_report(test_set.dataset, table, images)])

    def activate(self, outputs: Tensor) -> Tensor:
        """Convert logits (B, K) to the probability of each label."""
        return outputs.sigmoid()

    def average(self, targets: Sequence["Labels"]) -> "Labels":
        """Return a copy whose thresholds are the means of those of `targets`."""
        combined = copy(self)
        combined.thresholds = np.mean([each.thresholds for each in targets], axis=0)
        return combined

    def predict(
        self, values: Tensor, files: Sequence[str], label: Callable[[int], str]
    ) -> list[LabelPrediction]:
        """Convert label probabilities (B, K) to one prediction per image.

        A prediction has the labels whose probability is at least the threshold of the label.
        """
        chosen = values.numpy() >= self.thresholds
        return [
            LabelPrediction(file, labels=np.flatnonzero(row).tolist(), probabilities=probabilities)
            for file, row, probabilities in zip(files, chosen, values.tolist())
        ]

    def describe(self, prediction: LabelPrediction, label: Callable[[int], str]) -> list[str]:
        return prediction.describe([label(i) for i in range(len(self.thresholds))])


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Compute probabilities in float32, so that they equal those of `Labels.activate`."""
    return torch.from_numpy(logits).sigmoid().numpy()
