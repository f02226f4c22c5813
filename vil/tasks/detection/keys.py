"""Config keys of detectors."""

from vil.config.rules import (
    Conflict,
    Rule,
    at_least,
    below_one,
    fraction,
    is_range,
    one_of,
    positive_numbers,
    probability,
)
from vil.utils.registry import Key, Section

DECLARED = (
    Section(
        "DETECTION",
        "torchvision detectors on the stages' maps. DATA.NUM_CLASSES counts the categories "
        "without the background, INPUT.IMAGE_SIZE is the longest side that positions are made "
        "for.",
    ),
    Key(
        "MODEL",
        "",
        "The detector; empty: a classifier.",
        one_of("", "mask_rcnn", "faster_rcnn", "retinanet"),
    ),
    Key(
        "HEADS",
        "v1",
        "torchvision's v1 heads, or v2: deeper, with norms, and GIoU for retinanet.",
        one_of("v1", "v2"),
    ),
    Section("DETECTION.FPN", "The feature pyramid."),
    Key(
        "STAGES",
        [1, 2, 3, 4],
        "Stages used by the feature pyramid; retinanet does not use 1.",
        Rule(
            lambda v: v and v == sorted(set(v)) and v[0] > 0, "ascending numbers of stages from 1"
        ),
    ),
    Key("CHANNELS", 256, "Channels of each level and of retinanet's head.", at_least(1)),
    Key("NORM", False, "LayerNorm on each stage's map before the pyramid."),
    Section("DETECTION.ANCHORS", "Anchor boxes."),
    Key(
        "SIZES",
        [32, 64, 128, 256, 512],
        "Anchor side of each level in pixels, finest first: one more than stages (the pooled "
        "level); for retinanet up to two more (P6, P7).",
        Rule(lambda v: v and min(v) > 0, "a number above 0 for each level"),
    ),
    Key("OCTAVES", 1, "Sizes per level: side * 2^(i / OCTAVES); retinanet uses 3.", at_least(1)),
    Key("RATIOS", [0.5, 1.0, 2.0], "Height / width.", positive_numbers),
    Section("DETECTION.RPN", "Region proposals of mask_rcnn and faster_rcnn."),
    Key("PRE_NMS_TRAIN", 2000, "Proposals per level before NMS in training.", at_least(1)),
    Key("PRE_NMS_TEST", 1000, "Proposals per level before NMS in evaluation.", at_least(1)),
    Key("POST_NMS_TRAIN", 1000, "Proposals per image after NMS in training.", at_least(1)),
    Key("POST_NMS_TEST", 1000, "Proposals per image after NMS in evaluation.", at_least(1)),
    Key("SAMPLES", 256, "Anchors per image that the loss averages over.", at_least(1)),
    Section("DETECTION.BOX", "Box head of mask_rcnn and faster_rcnn."),
    Key("CHANNELS", 1024, "Width of the box head's hidden layers.", at_least(1)),
    Key("SAMPLES", 512, "Proposals per image that the box head trains on.", at_least(1)),
    Key("POSITIVE", 0.25, "Maximum fraction of these proposals that match an object.", fraction),
    Key(
        "SAMPLING_RATIO",
        2,
        "Points per side of a 7 x 7 cell in RoIAlign; 0: adaptive.",
        at_least(0),
    ),
    Section("DETECTION.MASK", "Mask head of mask_rcnn."),
    Key("CHANNELS", 256, "Channels of the mask head's convolutions.", at_least(1)),
    Key("LAYERS", 4, "Convolutions of the mask head before the upsampling.", at_least(1)),
    Key(
        "SAMPLING_RATIO",
        2,
        "Points per side of a 14 x 14 cell in RoIAlign; 0: adaptive.",
        at_least(0),
    ),
    Section("DETECTION.TEST", "Detections to keep."),
    Key("SCORE", 0.05, "Minimum score.", below_one),
    Key("NMS", 0.5, "IoU threshold of NMS within a class.", probability),
    Key("PER_IMAGE", 100, "Maximum number of detections per image.", at_least(1)),
    Key("TILE", 0, "Predict in tiles of this side in pixels; 0: the full image.", at_least(0)),
    Key("OVERLAP", -1, "Overlap of tiles in pixels; -1: a quarter of a tile.", at_least(-1)),
    Section("DETECTION.INPUT", "Resizing and augmentation of images."),
    Key("TRAIN_SIZES", [800], "Shorter sides in training, one per image.", positive_numbers),
    Key("TEST_SIZE", 800, "Shorter side in evaluation.", at_least(1)),
    Key("MAX_SIZE", 1333, "Maximum of the longer side.", at_least(1)),
    Key("FLIP", 0.5, "Probability of a horizontal flip in training.", probability),
    Key(
        "JITTER",
        [],
        "Large-scale jitter instead of TRAIN_SIZES: range of the scale, such as [0.1, 2.0], "
        "relative to an image that fits MAX_SIZE; then crop and pad to MAX_SIZE. Empty: none.",
        Rule(lambda v: not v or is_range(v), "empty, or 0 < low <= high"),
    ),
    Key("GROUP_ASPECTS", True, "Make batches of either wide or tall images."),
    Key("KEEP_EMPTY", False, "Also train on images without a box."),
    Conflict(
        ("DETECTION.TEST.OVERLAP", "DETECTION.TEST.TILE"),
        lambda overlap, tile: overlap >= 0 and tile == 0,
        "an overlap needs tiles: set DETECTION.TEST.TILE (--tile), too",
    ),
    Conflict(
        ("DETECTION.TEST.OVERLAP", "DETECTION.TEST.TILE"),
        lambda overlap, tile: 0 < tile <= overlap,
        "the overlap must be smaller than the tile",
    ),
)
