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
        "Training sets, concatenated: names or paths (docs/guides/data.md).",
        not_empty,
    ),
    Key(
        "TEST",
        ("imagenet",),
        "Test sets. Without DATA.VAL, they are evaluated during training, and the first one "
        "selects the best checkpoint.",
        not_empty,
    ),
    Key(
        "VAL",
        (),
        "Validation sets, evaluated during training; the first one selects the best "
        "checkpoint, and DATA.TEST is evaluated once, at the end. Empty: DATA.TEST takes their "
        "place.",
        Rule(lambda names: "" not in names, "names that are not empty"),
        element="",
    ),
    Key(
        "VAL_FRACTION",
        0.0,
        "Fraction of the training images to hold out for validation, after the test split; 0: "
        "the dataset's own split.",
        below_one,
    ),
    Key(
        "TEST_FRACTION",
        0.0,
        "Fraction of the training images to hold out for the test; 0: the dataset's own split.",
        below_one,
    ),
    Key(
        "FOLDS",
        0,
        "Folds of a cross-validation. Fold DATA.FOLD is the test split or, without DATA.VAL, "
        "the validation split. 0: no folds.",
        Rule(lambda folds: folds == 0 or folds >= 2, "0, or at least 2"),
    ),
    Key("FOLD", 0, "The fold that is held out, from 0 to DATA.FOLDS - 1.", at_least(0)),
    Key(
        "SPLIT_SEED",
        0,
        "Seed for dividing images by VAL_FRACTION, TEST_FRACTION and FOLDS.",
        between(0, 2**32 - 1),
    ),
    Key(
        "GROUP_BY",
        "auto",
        "Images that stay in the same split. column: those with the same group in a table; "
        "content: identical ones; auto: column, and content up to 50000 images.",
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
        "Number of classes of the head; auto: the number in the training set.",
        Rule(lambda value: value == "auto" or value >= 1, "auto, or at least 1"),
        words=("auto",),
    ),
    Key(
        "CLASSES",
        "by_name",
        "How the classes of a test set or a resumed run are matched with the model's.",
        one_of("by_name", "by_position"),
    ),
    Key(
        "TARGETMAP",
        "",
        "JSON file, relative to DATA.PATH, that maps the model's classes to those of the test "
        "sets; empty: the same classes.",
    ),
    Key("PATH", "./datasets", "Root folder of the datasets (--data).", not_empty),
    Key("DATA_DIR", "./data", "Additional folder to search for the file MODEL.MODEL_PATH."),
    Key(
        "VALUE_RANGE",
        (),
        "Pixel values [low, high] that become black and white, for images with more than 8 "
        "bits. auto: 0 to 65535 for 16 bits, 0 to 1 for floats.",
        Rule(lambda v: not v or is_interval(v), "auto, or [low, high] with low < high"),
    ),
    Key(
        "MAX_BAD_FRACTION",
        0.01,
        "Fraction of unreadable images above which the run stops.",
        probability,
    ),
    Section(
        "DATA.KWARGS",
        "Keyword arguments of the datasets. Each dataset gets those that it accepts.",
        extensible=True,
    ),
    Section("LOSS", "The training loss."),
    Key(
        "LOSS", "xentropy", "Name of the loss.", RegistryRule("loss", extra=("multisoftmax", "mse"))
    ),
    Key(
        "LABEL_SMOOTHING",
        0.0,
        "Fraction of the target probability that is distributed over all classes.",
        below_one,
    ),
    Key(
        "CLASS_WEIGHTS",
        ("none",),
        "Weight of each class in the loss. balanced: training images / (classes x images of "
        "the class). multilabel: weight of the images with the label; balanced: images without "
        "it / images with it.",
        Rule(
            lambda v: list(v) in (["none"], ["balanced"]) or are_weights(v),
            "none, balanced, or a list of numbers of at least 0, one per class",
            choices=("none", "balanced"),
        ),
    ),
    Key(
        "LOGIT_ADJUSTMENT",
        0.0,
        "Logit adjustment (arXiv:2007.07314): in training, add this factor times the log of "
        "the class frequencies to the logits. 1: optimizes balanced accuracy.",
        at_least(0),
    ),
    Section("LOSS.FOCAL", "The focal loss."),
    Key("NORMALIZE", True, "Focal loss: sum over classes instead of averaging over them."),
    Key("ALPHA", 1.0, "Focal loss: weight of the positives.", at_least(0)),
    Key("GAMMA", 0.5, "Focal loss: exponent that weights down easy examples.", at_least(0)),
    Section("DATALOADER", "Batches and worker processes of the data loaders."),
    Key(
        "BSZ", 128, "Images per batch of all processes together; see OPTIM.ACCUMULATE.", at_least(1)
    ),
    Key(
        "SAMPLER",
        "random",
        "random: every image once per epoch. balanced: every class equally often.",
        one_of("random", "balanced"),
    ),
    Key(
        "WORKERS",
        0,
        "Worker processes per data loader of each training process; 0: none; -1: from the "
        "number of cores.",
        between(-1, 4096),
    ),
    Conflict(
        ("LOSS.LOGIT_ADJUSTMENT", "LOSS.LOSS"),
        lambda factor, loss: factor > 0 and loss != "xentropy",
        "logits are only adjusted for a softmax: set LOSS.LOSS to xentropy",
    ),
)
