"""Config keys of input images and mixed precision."""

from vil.config.rules import Conflict, Rule, between, fraction, one_of
from vil.utils.registry import Key, Section

DECLARED = (
    Section("INPUT", "The images that the network sees."),
    Key(
        "CHANNELS",
        3,
        "Channels of the images: 1 gray, 3 RGB, any other number bands (docs/guides/labels.md).",
        between(1, 16),
    ),
    Key(
        "MEAN",
        [0.485, 0.456, 0.406],
        "Mean of each channel, for pixel values in 0..1.",
        Rule(lambda value: 1 <= len(value) <= 16, "one number, or one per channel"),
    ),
    Key(
        "STD",
        [0.229, 0.224, 0.225],
        "Standard deviation of each channel, for pixel values in 0..1.",
        Rule(lambda v: 1 <= len(v) <= 16 and min(v) > 0, "one number above 0, or one per channel"),
    ),
    Key(
        "BACKGROUND",
        [255, 255, 255],
        "Color (red, green, blue) behind transparent pixels, from 0 to 255. Images whose alpha "
        "channel is a band (CHANNELS 2 or 4) do not use it.",
        Rule(lambda v: len(v) == 3 and 0 <= min(v) <= max(v) <= 255, "three numbers in 0..255"),
    ),
    Key(
        "IMAGE_SIZE",
        224,
        "Side of the square input images of the model, in pixels.",
        between(1, 16384),
    ),
    Key(
        "CROP_PCT",
        0.875,
        "Evaluation resizes the shorter side to int(IMAGE_SIZE / CROP_PCT), then crops the "
        "center; so does training with FINETUNE.FINETUNE.",
        fraction,
    ),
    Key("INTERPOLATION", 2, "Resize interpolation: 2 bilinear, 3 bicubic.", one_of(2, 3)),
    Conflict(
        ("INPUT.IMAGE_SIZE", "INPUT.CROP_PCT"),
        lambda side, crop_pct: crop_pct * max(4096, 2 * side) < side,
        "images would be resized to more than 4096 pixels and twice IMAGE_SIZE a side: raise "
        "CROP_PCT",
    ),
    Conflict(
        ("INPUT.CHANNELS", "INPUT.MEAN", "INPUT.STD"),
        lambda channels, mean, std: not {len(mean), len(std)} <= {1, channels},
        "MEAN and STD need one number, or one per channel, such as INPUT.MEAN '[0.5]' "
        "INPUT.STD '[0.25]'",
    ),
    Section("AMP", "Mixed precision and memory layout."),
    Key("ENABLED", False, "Compute the forward pass and the loss in AMP.DTYPE (autocast)."),
    Key(
        "DTYPE",
        "bfloat16",
        "Dtype of autocast; float16 uses loss scaling.",
        one_of("bfloat16", "float16"),
    ),
    Key("TF32", True, "Allow TF32 in float32 matmuls and convolutions on CUDA."),
    Key(
        "MEMORY_FORMAT",
        "nchw",
        "Memory format of weights and images; nhwc is channels-last.",
        one_of("nchw", "nhwc"),
    ),
)
