"""Config keys of multilabel classification and of regression."""

from vil.config.rules import Rule, one_of
from vil.utils.registry import Key, Section

MULTILABEL = (
    Section("MULTILABEL", "Multilabel classification: any number of labels (TASK multilabel)."),
    Key(
        "LOSS",
        "bce",
        "bce: binary cross entropy; asymmetric: with less weight for easy negatives "
        "(arXiv:2009.14119).",
        one_of("bce", "asymmetric"),
    ),
)

REGRESSION = (
    Section("REGRESSION", "Regression: one or more numbers per image (TASK regression)."),
    Key(
        "LOSS",
        "huber",
        "huber: squared error up to one standard deviation, linear above; mse: squared; mae: "
        "absolute error.",
        one_of("huber", "mse", "mae"),
    ),
    Key(
        "MEAN",
        (),
        "Mean of each number; the network predicts (number - MEAN) / STD. auto: from the "
        "training set.",
    ),
    Key(
        "STD",
        (),
        "Standard deviation of each number, see MEAN.",
        Rule(lambda v: all(x > 0 for x in v), "auto, or numbers above 0"),
    ),
)
