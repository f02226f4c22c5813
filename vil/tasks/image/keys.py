"""Config keys of multilabel classification and of regression."""

from vil.config.rules import Rule, at_least, below_one, one_of, positive
from vil.utils.registry import Key, Section

MULTILABEL = (
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

REGRESSION = (
    Section("REGRESSION", "Regression: one or more numbers per image (TASK regression)."),
    Key(
        "LOSS",
        "huber",
        "huber: squared error up to HUBER_DELTA, linear above. mse: squared error. mae: absolute "
        "error.",
        one_of("huber", "mse", "mae"),
    ),
    Key(
        "HUBER_DELTA",
        1.0,
        "Error at which the Huber loss becomes linear, in standard deviations of the numbers.",
        positive,
    ),
    Key(
        "MEAN",
        (),
        "Mean of each number. The network predicts (number - MEAN) / STD. auto: computed from the "
        "training set; the run's config.yaml has the computed values.",
    ),
    Key(
        "STD",
        (),
        "Standard deviation of each number, see MEAN.",
        Rule(lambda v: all(x > 0 for x in v), "auto, or numbers above 0"),
    ),
)
