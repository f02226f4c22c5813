"""Masked image modeling: predict the pixels of masked squares (SimMIM, arXiv:2111.09886).

build.py  task from a config    model.py  network that predicts pixels    target.py  masks and loss

ENTRY describes the task to the registry (see `vil/tasks/__init__.py`).
"""

from vil.config.rules import Rule, at_least
from vil.utils.registry import Key, Section

# {name: (label, unit, higher is better)}, see `target.MaskedPixels.measure`
METRICS = {
    "skill": ("error below that of the mean color", "%", True),
    "loss": ("mean absolute error of masked pixels", "", False),
}
DECLARED = (
    Section("SIMMIM", "Masked image modeling, TASK simmim (docs/guides/masked_images.md)."),
    Key(
        "RATIO",
        0.6,
        "Share of the squares of an image that are masked.",
        Rule(lambda v: 0 < v < 1, "above 0 and below 1"),
    ),
    Key(
        "PATCH",
        0,
        "Side of the squares in pixels; 0: the stride of the network's last map.",
        at_least(0),
    ),
)
ENTRY = dict(
    home="vil.tasks.simmim.build:MaskedImages",
    about="pixels of masked squares, without labels",
    noun="network for masked images",
    declares=DECLARED,
    metrics=METRICS,
    formats=("json",),
)
