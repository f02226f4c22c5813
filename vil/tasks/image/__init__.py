"""Tasks with one target per image: a class, a set of labels, or numbers.

task.py         the task: data, loss, evaluation, inference
build.py        targets, transforms and datasets from a config      keys.py  config keys
target.py       what a kind of target defines
classes.py, labels.py, numbers.py       the three kinds of target
losses.py       training losses         class_weights.py   weights of rare classes
predictions.py  predictions and the output formats of `vil predict`
class_metrics.py  metrics of classes    calibration.py     temperature and thresholds
report.py       the part of a report    probe.py           simple classifiers of features

ENTRIES describes the tasks to the registry (see `vil/tasks/__init__.py`).
"""

from collections.abc import Callable, Mapping

from vil.tasks.image import keys
from vil.utils.registry import Key, Registry

_HERE = "vil.tasks.image"
# {name: (label, unit, higher is better)}, see `vil.tasks.image.class_metrics.metric_names`
CLASS_METRICS = {
    "top1": ("top-1", "%", True),
    "top5": ("top-5", "%", True),
    "balanced_accuracy": ("balanced accuracy", "%", True),
    "macro_precision": ("macro precision", "%", True),
    "macro_recall": ("macro recall", "%", True),
    "macro_f1": ("macro F1", "%", True),
    "auroc": ("AUROC", "%", True),
    "average_precision": ("average precision", "%", True),
    "ece": ("calibration error", "%", False),
    "loss": ("loss", "", False),
}
LABEL_METRICS = {
    "map": ("mean average precision", "%", True),
    "macro_f1": ("macro F1", "%", True),
    "micro_f1": ("micro F1", "%", True),
    "exact": ("images with all labels correct", "%", True),
    "loss": ("loss", "", False),
}
NUMBER_METRICS = {
    "mae": ("mean absolute error", "", False),
    "rmse": ("root mean squared error", "", False),
    "r2": ("R2", "", True),
    "loss": ("loss", "", False),
}
ENTRIES = {
    "classification": dict(
        home=f"{_HERE}.build:Classification",
        about="one class per image",
        noun="classifier",
        metrics=CLASS_METRICS,
        mapped_metrics=("top1", "top5", "loss"),
        formats=("table", "json", "csv", "probabilities"),
    ),
    "multilabel": dict(
        home=f"{_HERE}.build:Multilabel",
        about="any number of labels per image",
        noun="multilabel classifier",
        declares=keys.MULTILABEL,
        formats=("table", "json", "csv", "probabilities"),
        metrics=LABEL_METRICS,
    ),
    "regression": dict(
        home=f"{_HERE}.build:Regression",
        about="one or more numbers per image",
        noun="regression model",
        declares=keys.REGRESSION,
        formats=("table", "json", "csv"),
        metrics=NUMBER_METRICS,
    ),
}

# Called as loss(logits, targets, smoothing, **own), see losses.py.
LOSSES = Registry("loss", check=f"{_HERE}.losses:check_loss")
LOSSES.add("xentropy", f"{_HERE}.losses:xentropy", "cross entropy")
LOSSES.add("bce", f"{_HERE}.losses:bce", "binary cross entropy, a mean over classes")
LOSSES.add("sigmoid", f"{_HERE}.losses:sigmoid", "binary cross entropy, summed over classes")
LOSSES.add(
    "focal",
    f"{_HERE}.losses:focal",
    "binary cross entropy with easy predictions down-weighted",
    keys={name: f"LOSS.FOCAL.{name.upper()}" for name in ("alpha", "gamma", "normalize")},
)


def register_loss(
    name: str, loss: Callable | str, *, keys: Mapping[str, str | Key] | None = None, about: str = ""
) -> None:
    """Register a loss as the value `name` of the config key LOSS.LOSS.

    loss: a function loss(logits, targets, smoothing, **arguments) that returns a scalar, or its
    location "module:function". For B images and K classes, `logits` is (B, K), and `targets` is
    either classes (B,) int64 or soft targets (B, K) float. `smoothing` is the amount of label
    smoothing.
    keys: {additional keyword argument of the loss: config key that sets it}.
    about: a one-line description.

    Raises ValueError if the name is taken, or if the loss does not return a differentiable scalar
    in test calls. A loss given by its location is not tested.
    """
    LOSSES.register(name, loss, about, keys=keys)
