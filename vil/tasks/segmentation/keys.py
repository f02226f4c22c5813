"""Config keys of semantic segmentation."""

from vil.config.rules import Conflict, Rule, at_least, fraction, is_range, probability
from vil.utils.registry import Key, Section

MODELS = ("fpn", "mlp", "upernet")
SMP = "smp/"  # start of the name of a model with a decoder of segmentation_models_pytorch
OUTPUTS = ("overlay", "classes", "probabilities")

DECLARED = (
    Section(
        "SEGMENTATION",
        "Semantic segmentation. INPUT.IMAGE_SIZE is the side of the crops in training.",
    ),
    Key(
        "MODEL",
        "",
        "The head: fpn, mlp, upernet, or smp/NAME for a model of segmentation_models_pytorch; "
        "empty: another task.",
        Rule(
            lambda v: v in ("", *MODELS) or v.startswith(SMP),
            f"empty, {', '.join(MODELS)}, or smp/NAME",
        ),
    ),
    Key("CHANNELS", 128, "Channels of the head fpn, mlp or upernet.", at_least(1)),
    Key(
        "PALETTE",
        [],
        "Red, green and blue of each class, one class after the other; empty: those of the "
        "training set, which a run records.",
        Rule(
            lambda v: len(v) % 3 == 0 and all(0 <= n <= 255 for n in v),
            "three numbers from 0 to 255 per class",
        ),
        element=0,
    ),
    Key("IGNORE", 255, "Value of pixels without a label in mask files.", at_least(0)),
    Key(
        "LOSS",
        "ce",
        "Sum of losses with weights, such as ce + dice:0.5, of ce, dice, focal and lovasz.",
    ),
    Key(
        "HARD_PIXELS",
        1.0,
        "Share of the pixels of an image, those with the largest losses, that count in ce.",
        Rule(lambda v: 0 < v <= 1, "above 0, at most 1"),
    ),
    Section("SEGMENTATION.INPUT", "Augmentation of images and masks."),
    Key(
        "SCALE",
        [0.5, 2.0],
        "Range of the random factor by which images are scaled, at least to the size of a crop.",
        Rule(is_range, "0 < low <= high"),
    ),
    Key(
        "MAX_SHARE",
        0.75,
        "Largest share of one class in a crop; ten crops are tried. 1: any.",
        fraction,
    ),
    Key("FLIP", 0.5, "Probability of a horizontal flip.", probability),
    Key("VFLIP", 0.0, "Probability of a vertical flip.", probability),
    Key("QUARTERS", False, "Rotate by a random multiple of 90 degrees."),
    Section("SEGMENTATION.TEST", "Evaluation and prediction."),
    Key(
        "SIZE",
        0,
        "Length of the shorter side to which images are resized, in pixels; 0: not resized.",
        at_least(0),
    ),
    Key("TILE", 0, "Side of the windows of large images, in pixels; 0: whole images.", at_least(0)),
    Key("OVERLAP", -1, "Overlap of windows in pixels; -1: a quarter of a window.", at_least(-1)),
    Key(
        "BOUNDARY",
        2,
        "Distance in pixels up to which boundaries agree, for boundary F1.",
        at_least(1),
    ),
    Key(
        "OUTPUTS",
        ["overlay"],
        "What vil predict --output writes for each image: overlay, classes, probabilities.",
        Rule(lambda v: v and set(v) <= set(OUTPUTS), f"one or more of {', '.join(OUTPUTS)}"),
    ),
    Conflict(
        ("SEGMENTATION.TEST.OVERLAP", "SEGMENTATION.TEST.TILE"),
        lambda overlap, tile: overlap >= 0 and tile == 0,
        "an overlap needs windows: set SEGMENTATION.TEST.TILE (--tile) too",
    ),
    Conflict(
        ("SEGMENTATION.TEST.OVERLAP", "SEGMENTATION.TEST.TILE"),
        lambda overlap, tile: 0 < tile <= overlap,
        "the overlap must be smaller than the window",
    ),
)
