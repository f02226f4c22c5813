"""Run report of a multilabel model: a table of labels, and the images with the most errors."""

from collections.abc import Sequence

import numpy as np
from torch import nn

from vil.tasks.base import TaskReport
from vil.tasks.image_report import SHOWN, ReportTable, make_thumbnail, render_parts
from vil.tasks.multilabel.task import MultilabelTask, sigmoid

MOST_LABELS = 100  # rows of the table


def report_test_set(
    task: MultilabelTask, model: nn.Module, class_names: Sequence[str], checkpoint: str
) -> TaskReport:
    """Evaluate a model on the first test set, and return cards and sections of the run report.

    class_names: the names of the labels. checkpoint: description of the checkpoint, which is shown
    on a card.
    """
    test_set, outputs = task.first_outputs(model)
    metrics = task.score(outputs)
    remark = f"on {test_set}, {metrics['count']:,} images"
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
            f"{task.thresholds[i]:.3f}",
        )
        for i in order[:MOST_LABELS]
    ]
    caption = f"Labels on {test_set}, the lowest average precision first"
    columns = ("label", "images", "average precision %", "F1 %", "threshold")
    truth, probabilities = outputs.targets > 0.5, sigmoid(outputs.values)
    wrong = ((probabilities >= task.thresholds) != truth).sum(axis=1)
    losses = np.logaddexp(0, np.where(truth, -1, 1) * outputs.values).mean(axis=1)
    worst = np.lexsort((-losses, -wrong))[:SHOWN]

    def names_of(chosen: np.ndarray) -> str:
        return ", ".join(class_names[i] for i in np.flatnonzero(chosen)) or "none"

    gallery = [
        make_thumbnail(
            task.test_sets[test_set].dataset,
            int(outputs.indices[i]),
            [
                f"true: {names_of(truth[i])}",
                f"predicted: {names_of(probabilities[i] >= task.thresholds)}",
            ],
        )
        for i in worst.tolist()
    ]
    sections = render_parts(
        [ReportTable(caption, columns, rows)], (), [("Images with the most errors", gallery)]
    )
    return TaskReport(cards, [sections])
