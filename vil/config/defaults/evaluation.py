"""Config keys of evaluation."""

from vil.utils.registry import Key, Section

DECLARED = (
    Section("EVAL", "Evaluation on the test sets."),
    Key(
        "METRIC",
        "",
        "Metric that selects the best checkpoint, on the first set of DATA.VAL or, if that is "
        "empty, of DATA.TEST. Empty: the default metric of the task (top1, box_ap, mask_ap).",
    ),
    Key(
        "FAST",
        False,
        "Optimize the model for inference in vil evaluate and vil predict, with "
        "vil.optimize_for_inference, in AMP.DTYPE if AMP.ENABLED is set. Training ignores it.",
    ),
)
