"""Config keys of regression."""

from vil.config.rules import Rule, one_of, positive
from vil.utils.registry import Key, Section

DECLARED = (
    Section("REGRESSION", "Regression: one or more numbers per image (TASK regression)."),
    Key(
        "LOSS",
        "huber",
        "huber: squared up to HUBER_DELTA, then linear. mse: squared. mae: absolute.",
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
        "Mean of each number; the network learns (number - MEAN) / STD. auto: of the training set; "
        "a run's config.yaml has the values.",
    ),
    Key(
        "STD",
        (),
        "Standard deviation of each number, see MEAN.",
        Rule(lambda v: all(x > 0 for x in v), "auto, or numbers above 0"),
    ),
)
