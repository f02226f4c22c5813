"""Metrics as text: `name value` pairs, each with the digits that its kind is read with."""

FORMATS = {
    "loss": ".4f",
    "top1": ".2f",
    "top5": ".2f",
    "lr": ".3e",
    "time": ".3f",
    "data": ".3f",
    "img/s": ".1f",
    "mem": ".0f",
}
# by the start of the name: a detector's average precision and recall, and the parts of a loss
FAMILIES = {
    "box_a": ".2f",
    "mask_a": ".2f",
    "loss_": ".4f",
    "classification": ".4f",
    "bbox_regression": ".4f",
}


def pairs(metrics: dict[str, float]) -> str:
    """{'loss': 2.3, 'top1': 41.5} -> 'loss 2.3000 top1 41.5'."""
    return " ".join(f"{name} {value:{format_of(name)}}" for name, value in metrics.items())


def format_of(name: str) -> str:
    """The format of a metric's value."""
    family = next((kind for start, kind in FAMILIES.items() if name.startswith(start)), ".4g")
    return FORMATS.get(name, family)
