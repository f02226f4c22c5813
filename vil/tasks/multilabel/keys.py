"""Config keys of multilabel classification."""

from vil.config.rules import one_of
from vil.utils.registry import Key, Section

DECLARED = (
    Section("MULTILABEL", "Multilabel classification: any number of labels (TASK multilabel)."),
    Key(
        "LOSS",
        "bce",
        "bce: binary cross entropy. asymmetric: binary cross entropy with a lower weight for easy "
        "negatives (arXiv:2009.14119).",
        one_of("bce", "asymmetric"),
    ),
)
