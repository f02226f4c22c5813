"""Config keys of evaluation."""

from vil.utils.registry import Key, Section

DECLARED = (
    Section("EVAL", "Evaluation on the test sets."),
    Key(
        "METRIC",
        "",
        "Metric that selects the best checkpoint, on the first set of DATA.VAL, or else of "
        "DATA.TEST. Empty: the task's default.",
    ),
    Key(
        "FAST",
        False,
        "Use vil.optimize_for_inference in vil evaluate and vil predict.",
    ),
)
