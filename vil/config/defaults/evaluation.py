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
    Key(
        "FAST",
        False,
        "vil evaluate and vil predict run a copy of the model that is optimized for inference, see "
        "vil.optimize_for_inference, in AMP's precision if AMP.ENABLED is set. Training ignores "
        "it.",
    ),
)
