"""Config keys of multilabel classification."""

from vil.config.rules import at_least, below_one, one_of
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
    Key("GAMMA_POS", 0.0, "asymmetric: exponent for images with the label.", at_least(0)),
    Key("GAMMA_NEG", 4.0, "asymmetric: exponent for images without the label.", at_least(0)),
    Key(
        "CLIP",
        0.05,
        "asymmetric: an image without the label has no loss if its probability is below this.",
        below_one,
    ),
)
