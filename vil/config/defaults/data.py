"""Config keys of datasets, losses and batches."""

from vil.config.rules import (
    Conflict,
    RegistryRule,
    Rule,
    are_weights,
    at_least,
    below_one,
    between,
    is_interval,
    not_empty,
    one_of,
    probability,
)
from vil.utils.registry import Key, Section

DECLARED = (
    Section("DATA", "Training and evaluation data."),
    Key(
        "TRAIN",
        ("imagenet",),
        "Training sets, concatenated: registered names, the `x.yaml` of a TSV set, a table "
        "`x.csv`, `x.tsv` or `x.parquet`, shards `x-{000..003}.tar`, or a folder `x/` of the "
        "library datasets.",
        not_empty,
    ),
    Key(
        "TEST",
        ("imagenet",),
        "Evaluation sets. The first selects the best checkpoint, unless DATA.VAL is set.",
        not_empty,
    ),
    Key(
        "VAL",
        (),
        "Evaluation sets during training; the first selects the best checkpoint, and DATA.TEST is "
        "evaluated once, after training. Empty: DATA.TEST.",
        Rule(lambda names: "" not in names, "names that are not empty"),
        element="",
    ),
    Key(
        "VAL_FRACTION",
        0.0,
        "Part of the training images (without those for testing) that is the validation split "
        "instead; 0: the set's own split.",
        below_one,
    ),
    Key(
        "TEST_FRACTION",
        0.0,
        "Part of the training images that is the test split instead; 0: the set's own split.",
        below_one,
    ),
    Key(
        "FOLDS",
        0,
        "Number of equal parts of the training images, one of which is the test split (the "
        "validation split, if DATA.VAL is empty) instead; 0: the set's own split.",
        Rule(lambda folds: folds == 0 or folds >= 2, "0, or at least 2"),
    ),
    Key("FOLD", 0, "The part that is held out, from 0 to DATA.FOLDS - 1.", at_least(0)),
    Key("SPLIT_SEED", 0, "Seed of VAL_FRACTION, TEST_FRACTION and FOLDS.", between(0, 2**32 - 1)),
    Key(
        "GROUP_BY",
        "auto",
        "Images that are never in different parts. column: those with the same value in a table's "
        "group column; content: identical images; none: no groups; auto: column and, up to 50000 "
        "images, content.",
        one_of("auto", "column", "content", "none"),
    ),
    Conflict(
        ("DATA.FOLD", "DATA.FOLDS"),
        lambda fold, folds: fold > 0 and fold >= folds,
        "the folds are numbered from 0 to DATA.FOLDS - 1",
    ),
    Conflict(
        ("DATA.VAL_FRACTION", "DATA.FOLDS", "DATA.VAL"),
        lambda fraction, folds, val: fraction > 0 and folds > 0 and not val,
        "both select the validation images: set one of them, or set DATA.VAL, so that the fold "
        "is the test set",
    ),
    Conflict(
        ("DATA.TEST_FRACTION", "DATA.FOLDS"),
        lambda fraction, folds: fraction > 0 and folds > 0,
        "both select the test images: set one of them",
    ),
    Conflict(
        ("DATA.TEST_FRACTION", "DATA.VAL"),
        lambda fraction, val: fraction > 0 and not val,
        "without DATA.VAL, DATA.TEST selects the best checkpoint: set DATA.VAL too, or "
        "DATA.VAL_FRACTION instead",
    ),
    Key(
        "NUM_CLASSES",
        1000,
        "Number of classes of the head. auto: that of the training set.",
        Rule(lambda value: value == "auto" or value >= 1, "auto, or at least 1"),
        words=("auto",),
    ),
    Key(
        "CLASSES",
        "by_name",
        "How to match the classes of a test set, or of a resumed run's data, with those that the "
        "model learned.",
        one_of("by_name", "by_position"),
    ),
    Key(
        "TARGETMAP",
        "",
        "JSON file that maps the model's classes to those of the test sets, relative to DATA.PATH.",
    ),
    Key("PATH", "./datasets", "Root folder of the data (--data).", not_empty),
    Key("DATA_DIR", "./data", "Second folder to search for MODEL.MODEL_PATH."),
    Key(
        "VALUE_RANGE",
        (),
        "Values [low, high] that become black and white in gray images of more than 8 bits. auto: "
        "0 to 65535 for 16 bits, 0 to 1 for floats.",
        Rule(lambda v: not v or is_interval(v), "auto, or [low, high] with low < high"),
    ),
    Key("MAX_BAD_FRACTION", 0.01, "Tolerated fraction of unreadable images.", probability),
    Section(
        "DATA.KWARGS", "Arguments for the datasets that accept them; any name.", extensible=True
    ),
    Section("LOSS", "The training loss."),
    Key(
        "LOSS", "xentropy", "Name of the loss.", RegistryRule("loss", extra=("multisoftmax", "mse"))
    ),
    Key(
        "LABEL_SMOOTHING",
        0.0,
        "Part of the target probability that is distributed over all classes.",
        below_one,
    ),
    Key(
        "CLASS_WEIGHTS",
        ("none",),
        "Weight of each class in the loss. balanced: number of training images divided by (number "
        "of classes x images of the class).",
        Rule(
            lambda v: list(v) in (["none"], ["balanced"]) or are_weights(v),
            "none, balanced, or a list of numbers of at least 0, one per class",
            choices=("none", "balanced"),
        ),
    ),
    Key(
        "LOGIT_ADJUSTMENT",
        0.0,
        "Factor of the logarithm of the class frequencies that is added to the logits in training "
        "(arXiv:2007.07314); 0: none, 1: for balanced accuracy.",
        at_least(0),
    ),
    Section("LOSS.FOCAL", "The focal loss."),
    Key("NORMALIZE", True, "Focal loss: sum over classes instead of averaging over them."),
    Key("ALPHA", 1.0, "Focal loss: weight of the positives.", at_least(0)),
    Key("GAMMA", 0.5, "Focal loss: exponent that weights down easy examples.", at_least(0)),
    Section("DATALOADER", "Batches and loader processes."),
    Key("BSZ", 128, "Images per batch over ALL processes; see OPTIM.ACCUMULATE.", at_least(1)),
    Key(
        "SAMPLER",
        "random",
        "random: every image once per epoch. balanced: every class equally often, so that images "
        "of rare classes are repeated.",
        one_of("random", "balanced"),
    ),
    Key("RE", "no", "nothing reads it", ignored=True),
    Key(
        "WORKERS",
        0,
        "Loader processes per training process; 0: load in the training process.",
        between(0, 4096),
    ),
    Conflict(
        ("LOSS.LOGIT_ADJUSTMENT", "LOSS.LOSS"),
        lambda factor, loss: factor > 0 and loss != "xentropy",
        "logits are only adjusted for a softmax: set LOSS.LOSS xentropy",
    ),
)
