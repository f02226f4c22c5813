"""Config keys of input images and mixed precision."""

from vil.config.rules import Rule, between, fraction, one_of
from vil.utils.registry import Key, Section

DECLARED = (
    Section("INPUT", "The images that the network sees."),
    Key(
        "MEAN",
        [0.485, 0.456, 0.406],
        "Mean of the RGB channels, subtracted from images in 0..1.",
        Rule(lambda value: len(value) in (1, 3), "one or three numbers"),
    ),
    Key(
        "STD",
        [0.229, 0.224, 0.225],
        "Standard deviation of the RGB channels; divides images after MEAN is subtracted.",
        Rule(lambda v: len(v) in (1, 3) and min(v) > 0, "one or three numbers above 0"),
    ),
    Key("IMAGE_SIZE", 224, "Side of the square crop the model is built for.", between(1, 16384)),
    Key(
        "CROP_PCT",
        0.875,
        "Fraction of the resized image that the evaluation crop keeps: the shorter side is "
        "first resized to int(IMAGE_SIZE / CROP_PCT). Fine-tuning resizes training images in "
        "the same way.",
        fraction,
    ),
    Key("INTERPOLATION", 2, "Resize interpolation: 2 bilinear, 3 bicubic.", one_of(2, 3)),
    Section("AMP", "Mixed precision and memory layout."),
    Key("ENABLED", False, "Compute forward and loss in AMP.DTYPE (autocast)."),
    Key(
        "DTYPE",
        "bfloat16",
        "Precision of autocast; float16 uses loss scaling.",
        one_of("bfloat16", "float16"),
    ),
    Key("TF32", True, "Allow TF32 in float32 matmuls and convolutions on CUDA."),
    Key("MEMORY_FORMAT", "nchw", "nhwc: channels-last weights and images.", one_of("nchw", "nhwc")),
)
