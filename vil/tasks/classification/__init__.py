"""Classification of images with one class each.

build.py        task from a config              task.py            loss, evaluation, inference
losses.py       training losses                 output_formats.py  formats of `vil predict`
predictions.py  per-image predictions           metrics.py         metrics of predictions
calibration.py  temperature scaling             report.py          classifier's part of a report
probe.py        linear and nearest-neighbor classifiers of features

ENTRY describes the task to the registry (see `vil/tasks/__init__.py`).
"""

from collections.abc import Callable, Mapping

from vil.utils.registry import Key, Registry

_HERE = "vil.tasks.classification"
# {name: (label, unit, higher is better)}, see `vil.tasks.classification.metrics.metric_names`
METRICS = {
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
ENTRY = dict(
    home="vil.tasks.classification.build:Classification",
    about="one class per image",
    noun="classifier",
    metrics=METRICS,
    formats=("table", "json", "csv", "probabilities"),
    complete=("probabilities",),
    lacks={"evaluate --pictures": "--pictures supports only detectors; use vil report"},
)

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
