"""Config keys of augmentation."""

from vil.config.rules import (
    Conflict,
    RegistryRule,
    Rule,
    at_least,
    is_range,
    matches,
    one_of,
    probability,
)
from vil.utils.registry import Key, Section

DECLARED = (
    Section("AUG", "Augmentation of training images."),
    Key(
        "SCALE",
        (0.08, 1.0),
        "Random resized crop: range of the crop's area, as a fraction of the image.",
        Rule(lambda v: is_range(v) and v[1] <= 1, "two numbers, 0 < low <= high <= 1"),
    ),
    Key(
        "RATIO",
        (3 / 4, 4 / 3),
        "Random resized crop: range of the crop's aspect ratio.",
        Rule(is_range, "two numbers, 0 < low <= high"),
    ),
    Key(
        "COLOR_JITTER",
        [0.4, 0.4, 0.4, 0.1, 0.0],
        "Strengths of brightness, contrast, saturation and hue, and the probability (not with "
        "timm's transform).",
        Rule(
            lambda v: len(v) == 5 and min(v) >= 0 and v[3] <= 0.5 and v[4] <= 1,
            "five numbers of at least 0, with hue at most 0.5 and probability at most 1",
        ),
    ),
    Key(
        "GRAY_SCALE",
        0.0,
        "Probability of conversion to gray (not with timm's transform).",
        probability,
    ),
    Key(
        "GAUSSIAN_BLUR",
        0.0,
        "Probability of a Gaussian blur (not with timm's transform).",
        probability,
    ),
    Key(
        "MIXUP_PROB",
        0.0,
        "Probability that mixup or cutmix is applied to a batch; 0 disables both.",
        probability,
    ),
    Key("MIXUP", 0.0, "Alpha of mixup; 0 disables it.", at_least(0)),
    Key("MIXCUT", 0.0, "Alpha of cutmix; 0 disables it.", at_least(0)),
    Key(
        "MIXCUT_MINMAX",
        [],
        "Range of the side of cutmix's box, as a fraction of the image side. Empty: from "
        "AUG.MIXCUT.",
        Rule(lambda v: not v or (is_range(v) and v[1] <= 1), "empty, or 0 < low <= high <= 1"),
    ),
    Key(
        "MIXUP_SWITCH_PROB",
        0.5,
        "Probability of cutmix instead of mixup, if both are enabled.",
        probability,
    ),
    Key(
        "MIXUP_MODE",
        "batch",
        "Sample the mixing ratio per batch, per pair of images, or per image (elem).",
        one_of("batch", "pair", "elem"),
    ),
    Key(
        "REPEATED_AUG",
        False,
        "Repeated augmentation: an epoch has a third of the images, three times each.",
    ),
    Key(
        "TRANSFORM",
        "",
        "Transform that a plug-in registers, applied after all others except for random erasing "
        "(docs/guides/plugins.md).",
        RegistryRule("transform", extra=("",)),
    ),
    Section(
        "AUG.TIMM_AUG",
        "timm's training transform. Other keys are accepted, but not read.",
        extensible=True,
    ),
    Key("USE_TRANSFORM", False, "Use timm's training transform instead of torchvision's."),
    Key("RE_PROB", 0.25, "Random erasing: probability.", probability),
    Key(
        "RE_MODE",
        "pixel",
        "Random erasing: fill the box with zeros (const), one random color (rand) or random "
        "pixels (pixel).",
        one_of("const", "rand", "pixel"),
    ),
    Key("RE_COUNT", 1, "Random erasing: maximum number of boxes per image.", at_least(1)),
    Key("HFLIP", 0.5, "Probability of a horizontal flip, also without USE_TRANSFORM.", probability),
    Key("VFLIP", 0.0, "Probability of a vertical flip, also without USE_TRANSFORM.", probability),
    Key(
        "COLOR_JITTER",
        0.4,
        "Strength of the color jitter; timm ignores it if AUTO_AUGMENT is set.",
        at_least(0),
    ),
    Key(
        "AUTO_AUGMENT",
        "rand-m9-mstd0.5-inc1",
        "timm's auto-augmentation policy; empty: none.",
        matches(
            r"|(rand|augmix|originalr?|v0r?|3a)(-.*)?",
            "empty, or a policy: rand-..., augmix-..., v0",
        ),
    ),
    Conflict(
        ("AUG.MIXUP_PROB", "AUG.MIXUP", "AUG.MIXCUT", "AUG.MIXCUT_MINMAX"),
        lambda prob, mixup, cutmix, minmax: prob > 0 and not (mixup or cutmix or minmax),
        "there is nothing to mix with: set AUG.MIXUP or AUG.MIXCUT above 0",
    ),
)
