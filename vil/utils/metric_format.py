"""Format metrics as `name value` pairs. The number of digits depends on the metric."""

from collections.abc import Collection

FORMATS = {  # the start of a metric's name -> format of its value
    "loss": ".4f",
    "classification": ".4f",
    "bbox_regression": ".4f",
    "top": ".2f",
    "balanced_accuracy": ".2f",
    "macro_": ".2f",
    "precision": ".2f",
    "recall": ".2f",
    "f1": ".2f",
    "auroc": ".2f",
    "average_precision": ".2f",
    "ece": ".2f",
    "box_a": ".2f",
    "mask_a": ".2f",
    "miou": ".2f",
    "pixel_accuracy": ".2f",
    "mean_accuracy": ".2f",
    "fw_iou": ".2f",
    "boundary_f1": ".2f",
    "lr": ".3e",
    "time": ".3f",
    "data": ".3f",
    "img/s": ".1f",
    "mem": ".0f",
}

# metrics that lines of evaluations during training leave out
DETAILS = ("macro_precision", "macro_recall", "average_precision")


def digits_for(unit: str) -> str:
    """Return the format specification for values of a metric: two decimals for percentages, else
    four significant digits. unit: unit of the metric, such as "%"."""
    return ".2f" if unit == "%" else ".4g"


def format_pairs(metrics: dict[str, float]) -> str:
    """Return metrics as text: {'loss': 2.3, 'top1': 41.5} becomes 'loss 2.3000 top1 41.5'."""
    return " ".join(format_pair(name, value) for name, value in metrics.items())


def format_pair(name: str, value: float) -> str:
    form = next((form for start, form in FORMATS.items() if name.startswith(start)), ".4g")
    return f"{name} {value:{form}}"


def fit_pairs(metrics: dict[str, float], columns: int, first: Collection[str] = ()) -> str:
    """Return as many metrics as fit into `columns`, as text like that of `format_pairs`.

    first: names of the most important metrics, which have precedence over the others.
    """
    shown: dict[str, float] = {}
    for name in sorted(metrics, key=lambda name: name not in first):
        more = {key: value for key, value in metrics.items() if key in shown or key == name}
        if len(format_pairs(more)) <= columns:
            shown = more
    return format_pairs(shown)
