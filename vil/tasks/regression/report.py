"""Run report of a regression model: a table of errors, plots, and images."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import nn

from vil.tasks.base import TaskReport
from vil.tasks.image_report import SHOWN, ReportTable, make_thumbnail, render_parts
from vil.tasks.image_task import Outputs
from vil.tasks.regression.task import RegressionTask
from vil.utils.plot_text import plot_text

MAX_PLOTS = 6  # maximum number of predicted numbers that are plotted


def report_test_set(
    task: RegressionTask, model: nn.Module, class_names: Sequence[str], checkpoint: str
) -> TaskReport:
    """Evaluate a regression model on the first test set. Returns cards and sections for the run
    report.

    class_names: the names of the predicted numbers. checkpoint: description of the checkpoint,
    which is shown on a card.
    """
    test_set, outputs = task.first_outputs(model)
    metrics = task.score(outputs)
    remark = f"on {test_set}, {metrics['count']:,} images"
    cards = [
        ("Mean absolute error", f"{metrics['mae']:.4g}", checkpoint),
        ("Root mean squared error", f"{metrics['rmse']:.4g}", remark),
        ("R2", f"{metrics['r2']:.4f}", remark),
    ]
    each = metrics["per_number"]
    rows = [
        (name, f"{mae:.4g}", f"{rmse:.4g}", f"{r2:.4f}")
        for name, mae, rmse, r2 in zip(class_names, each["mae"], each["rmse"], each["r2"])
    ]
    columns = ("number", "mean absolute error", "root mean squared error", "R2")
    worst = np.argsort(-scaled_errors(task, outputs), kind="stable")[:SHOWN]
    gallery = [
        make_thumbnail(
            task.test_sets[test_set].dataset,
            int(outputs.indices[i]),
            [
                f"{name}: true {true:.4g}, predicted {predicted:.4g}"
                for name, true, predicted in zip(class_names, outputs.targets[i], outputs.values[i])
            ],
        )
        for i in worst.tolist()
    ]
    return TaskReport(
        cards,
        [
            render_parts(
                [ReportTable(f"Errors of each number on {test_set}", columns, rows)],
                [("Predicted and true numbers", plot_predictions(outputs, class_names))],
                [("Images with the largest errors", gallery)],
            )
        ],
    )


def scaled_errors(task: RegressionTask, outputs: Outputs) -> np.ndarray:
    """Return the normalized absolute error of each image, averaged over its K numbers, (N,).

    The error of a number is divided by the standard deviation of this number in the training set.
    """
    return (np.abs(outputs.values - outputs.targets) / task.std.cpu().numpy()).mean(axis=1)


def plot_predictions(outputs: Outputs, names: Sequence[str]) -> Figure:
    """Plot predicted numbers against true numbers, with one panel for each of the K numbers.

    names: names of the K numbers. Only the first MAX_PLOTS of them are plotted.
    """
    count = min(len(names), MAX_PLOTS)
    figure = Figure(figsize=(4 * min(count, 3), 3.6 * -(-count // 3)), layout="constrained")
    panels = figure.subplots(-(-count // 3), min(count, 3), squeeze=False).flat
    for panel, name, true, predicted in zip(panels, names, outputs.targets.T, outputs.values.T):
        panel.scatter(true, predicted, s=6, alpha=0.5)
        panel.axline((float(true.mean()), float(true.mean())), slope=1, color="gray", linewidth=1)
        panel.set(title=plot_text(name[:40]), xlabel="true", ylabel="predicted")
    return figure
