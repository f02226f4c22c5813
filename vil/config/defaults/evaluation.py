"""Config keys of evaluation."""

from vil.utils.registry import Key, Section

DECLARED = (
    Section("EVAL", "Evaluation on the test sets."),
    Key(
        "METRIC",
        "",
        "Metric on the first test set that selects the best checkpoint; empty: the task's default "
        "(top1, box_ap, mask_ap).",
    ),
)
