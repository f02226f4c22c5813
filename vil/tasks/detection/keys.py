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
        "torchvision's detectors. DATA.NUM_CLASSES is the number of categories without the "
        "background, and INPUT.IMAGE_SIZE the size for which absolute positions are made.",
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
        "Version of torchvision's heads; v2 are deeper and have norms, and retinanet's use the "
        "GIoU loss.",
        one_of("v1", "v2"),
    ),
    Key(
        "CATEGORY_IDS",
        [],
        "Category id of each class in the training annotation file; a run records them.",
        element=0,
    ),
    Section("DETECTION.FPN", "The feature pyramid."),
    Key(
        "STAGES",
        [1, 2, 3, 4],
        "Stages used by the feature pyramid; [2, 3, 4] in the published retinanet.",
        Rule(
            lambda v: v and v == sorted(set(v)) and v[0] > 0, "ascending numbers of stages from 1"
        ),
    ),
    Key("CHANNELS", 256, "Channels of each level and of retinanet's head.", at_least(1)),
    Key("NORM", False, "Apply a LayerNorm to each stage's output before the pyramid."),
    Section("DETECTION.ANCHORS", "Anchor boxes."),
    Key(
        "SIZES",
        [32, 64, 128, 256, 512],
        "Anchor size of each pyramid level in pixels, finest first: one level more than "
        "stages; retinanet up to two more.",
        Rule(lambda v: v and min(v) > 0, "a number above 0 for each level"),
    ),
    Key(
        "OCTAVES",
        1,
        "Anchor sizes per level: size * 2^(i / OCTAVES) for i = 0 .. OCTAVES - 1; 3 in the "
        "published retinanet.",
        at_least(1),
    ),
    Key(
        "RATIOS",
        [0.5, 1.0, 2.0],
        "Aspect ratios of anchors: height / width. Sides are rounded to even pixels.",
        positive_numbers,
    ),
    Section("DETECTION.RPN", "Region proposals of mask_rcnn and faster_rcnn."),
    Key("PRE_NMS_TRAIN", 2000, "Proposals per level before NMS in training.", at_least(1)),
    Key("PRE_NMS_TEST", 1000, "Proposals per level before NMS in evaluation.", at_least(1)),
    Key("POST_NMS_TRAIN", 1000, "Proposals per image after NMS in training.", at_least(1)),
    Key("POST_NMS_TEST", 1000, "Proposals per image after NMS in evaluation.", at_least(1)),
    Key("SAMPLES", 256, "Anchors per image that are sampled for the loss.", at_least(1)),
    Section("DETECTION.BOX", "Box head of mask_rcnn and faster_rcnn."),
    Key("CHANNELS", 1024, "Width of the box head's hidden layers.", at_least(1)),
    Key("SAMPLES", 512, "Proposals per image that are sampled for the loss.", at_least(1)),
    Key("POSITIVE", 0.25, "Maximum fraction of BOX.SAMPLES that match an object.", fraction),
    Key(
        "SAMPLING_RATIO",
        2,
        "RoIAlign samples this many points along each side of a cell of its 7 x 7 output; 0: "
        "adaptive.",
        at_least(0),
    ),
    Section("DETECTION.MASK", "Mask head of mask_rcnn."),
    Key("CHANNELS", 256, "Channels of the mask head's convolutions.", at_least(1)),
    Key("LAYERS", 4, "Convolutions of the mask head before the upsampling.", at_least(1)),
    Key(
        "SAMPLING_RATIO",
        2,
        "RoIAlign samples this many points along each side of a cell of its 14 x 14 output; 0: "
        "adaptive.",
        at_least(0),
    ),
    Section("DETECTION.TEST", "Selection of detections, and inference in tiles."),
    Key("SCORE", 0.05, "Minimum score of a detection.", below_one),
    Key("NMS", 0.5, "IoU threshold of NMS within a class.", probability),
    Key("PER_IMAGE", 100, "Maximum number of detections per image.", at_least(1)),
    Key(
        "TILE",
        0,
        "Side of the tiles of evaluation and vil predict, in pixels; 0: no tiles.",
        at_least(0),
    ),
    Key("OVERLAP", -1, "Overlap of tiles in pixels; -1: a quarter of a tile.", at_least(-1)),
    Section("DETECTION.INPUT", "Resizing and augmentation of images."),
    Key(
        "TRAIN_SIZES",
        [800],
        "Shorter sides in training, in pixels; one is sampled for each image.",
        positive_numbers,
    ),
    Key("TEST_SIZE", 800, "Length of the shorter side in evaluation, in pixels.", at_least(1)),
    Key("MAX_SIZE", 1333, "Maximum length of the longer side, in pixels.", at_least(1)),
    Key("FLIP", 0.5, "Probability of a horizontal flip in training.", probability),
    Key(
        "JITTER",
        [],
        "Large-scale jitter, such as [0.1, 2.0]: instead of TRAIN_SIZES, scale images to fit "
        "MAX_SIZE, times a random factor, and crop or pad them to MAX_SIZE. Empty: none.",
        Rule(lambda v: not v or is_range(v), "empty, or 0 < low <= high"),
    ),
    Key("GROUP_ASPECTS", True, "Make training batches of either wide or tall images."),
    Key("KEEP_EMPTY", False, "Also train on images without a box."),
    Conflict(
        ("DETECTION.TEST.OVERLAP", "DETECTION.TEST.TILE"),
        lambda overlap, tile: overlap >= 0 and tile == 0,
        "an overlap needs tiles: set DETECTION.TEST.TILE (--tile) too",
    ),
    Conflict(
        ("DETECTION.TEST.OVERLAP", "DETECTION.TEST.TILE"),
        lambda overlap, tile: 0 < tile <= overlap,
        "the overlap must be smaller than the tile",
    ),
)
