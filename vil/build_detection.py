"""The bridge from a config to detection: what `vil.build` and `vil.build_data` do where
DETECTION.MODEL is set."""

from collections.abc import Callable

import torch
from torch import nn
from yacs.config import CfgNode

from vil.config import ConfigError
from vil.config.defaults import tree_at
from vil.config.unused import warn_unused
from vil.data.synthetic.scenes import NUM_TRAIN, NUM_VAL
from vil.models.vision_longformer import MsViT
from vil.tasks.detection.data.datasets import DRAWN, CocoDataset, build_detection_set, own_arguments
from vil.tasks.detection.data.transforms import train_transform
from vil.tasks.detection.models.detectors import Settings, build_detector
from vil.tasks.detection.models.fpn import body_of
from vil.tasks.detection.task import DetectionTask

# Keys, and nodes of keys, that only classifiers read.
OF_CLASSIFIERS = (
    "INPUT.CROP_PCT", "INPUT.INTERPOLATION", "LOSS", "FINETUNE.FINETUNE", "FINETUNE.USE_TRAIN_AUG",
    "MODEL.VIT.AVG_POOL", *(f"AUG.{name}" for name in tree_at("AUG") if name != "REPEATED_AUG"),
)  # fmt: skip
# What a kind of detector does not have.
NOT_OF = {
    "retinanet": ("DETECTION.RPN", "DETECTION.BOX", "DETECTION.MASK"),
    "faster_rcnn": ("DETECTION.MASK",),
}


def warn_of_settings(cfg: CfgNode) -> None:
    """Those that the detector, or a classifier, does not read."""
    kind = cfg.DETECTION.MODEL
    if not kind:
        warn_unused(cfg, "DETECTION.MODEL is empty", ("DETECTION",))
        return
    warn_unused(cfg, f"{kind} is a detector", OF_CLASSIFIERS)
    warn_unused(cfg, f"{kind} has no such part", NOT_OF.get(kind, ()))
    if cfg.DETECTION.INPUT.JITTER:
        warn_unused(cfg, "DETECTION.INPUT.JITTER is set", ("DETECTION.INPUT.TRAIN_SIZES",))


def detector(cfg: CfgNode, network: MsViT) -> nn.Module:
    """The detector on a network whose head falls off."""
    c = cfg.DETECTION
    refuse_few_positions(cfg, network)
    settings = Settings(
        classes=cfg.DATA.NUM_CLASSES,
        version=c.HEADS,
        stages=c.FPN.STAGES,
        channels=c.FPN.CHANNELS,
        norm=c.FPN.NORM,
        anchor_sizes=c.ANCHORS.SIZES,
        anchor_octaves=c.ANCHORS.OCTAVES,
        anchor_ratios=c.ANCHORS.RATIOS,
        pre_nms=(c.RPN.PRE_NMS_TRAIN, c.RPN.PRE_NMS_TEST),
        post_nms=(c.RPN.POST_NMS_TRAIN, c.RPN.POST_NMS_TEST),
        rpn_samples=c.RPN.SAMPLES,
        box_channels=c.BOX.CHANNELS,
        box_samples=c.BOX.SAMPLES,
        box_positive=c.BOX.POSITIVE,
        box_sampling=c.BOX.SAMPLING_RATIO,
        mask_channels=c.MASK.CHANNELS,
        mask_layers=c.MASK.LAYERS,
        mask_sampling=c.MASK.SAMPLING_RATIO,
        score=c.TEST.SCORE,
        nms=c.TEST.NMS,
        per_image=c.TEST.PER_IMAGE,
        test_size=c.INPUT.TEST_SIZE,
        max_size=c.INPUT.MAX_SIZE,
        mean=cfg.INPUT.MEAN,
        std=cfg.INPUT.STD,
    )
    return build_detector(c.MODEL, body_of(network), settings)


def refuse_few_positions(cfg: CfgNode, network: MsViT) -> None:
    """ConfigError where absolute positions, made for INPUT.IMAGE_SIZE, are cropped and would not
    reach to the end of the largest picture."""
    stride, largest = network.strides[-1], cfg.DETECTION.INPUT.MAX_SIZE
    needed = -(-largest // stride) * stride
    cropped = cfg.MODEL.VIT.POS_RESIZE == "crop" and any(s.absolute for s in network.specs)
    if cropped and needed > cfg.INPUT.IMAGE_SIZE:
        raise ConfigError(
            f"INPUT.IMAGE_SIZE {cfg.INPUT.IMAGE_SIZE}: pictures of DETECTION.INPUT.MAX_SIZE "
            f"{largest} pixels need positions for {needed} (or MODEL.VIT.POS_RESIZE interpolate)"
        )


__all__ = ["dataset", "detector", "own_arguments", "task", "transform_for_training"]


def has_masks(cfg: CfgNode) -> bool:
    return cfg.DETECTION.MODEL == "mask_rcnn"


def dataset(
    cfg: CfgNode, name: str, split: str, transform: Callable | None, own: dict
) -> CocoDataset:
    """A set of pictures with boxes; `own` are the arguments it takes."""
    if cfg.DATA.TARGETMAP:
        raise ConfigError("DATA.TARGETMAP is for classifiers: leave it empty with DETECTION.MODEL")
    if len(cfg.DATA.TRAIN) > 1:
        raise ConfigError(
            f"DATA.TRAIN {', '.join(cfg.DATA.TRAIN)}: a detector trains on one set; join the files"
        )
    found = build_detection_set(
        name,
        cfg.DATA.PATH,
        split,
        transform,
        masks=has_masks(cfg),
        keep_empty=cfg.DETECTION.INPUT.KEEP_EMPTY,
        **own,
    )
    if not cfg.DETECTION.INPUT.GROUP_ASPECTS:
        found.groups = None
    return found


def few_drawn(cfg: CfgNode, folder: str) -> CfgNode:
    """The same with sets that lie in `folder` and have no more pictures than a step of training
    takes, where all sets are such that are drawn; as it is for others."""
    sets = {*cfg.DATA.TRAIN, *cfg.DATA.TEST}
    if not cfg.DETECTION.MODEL or not sets <= {*DRAWN}:
        return cfg
    few = cfg.clone()
    few.defrost()
    few.DATA.PATH = folder
    if "scenes" in sets:
        own, step = few.DATA.KWARGS, cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE
        for name, usual, most in (("train", NUM_TRAIN, step), ("val", NUM_VAL, 1)):
            given = own.get(name, usual)
            own[name] = min(given, most) if isinstance(given, int) else given
    return few


def transform_for_training(cfg: CfgNode) -> Callable:
    """Resizing, flips and jitter; of the colours nothing is changed."""
    shape = cfg.DETECTION.INPUT
    return train_transform(
        sizes=shape.TRAIN_SIZES,
        max_size=shape.MAX_SIZE,
        flip=shape.FLIP,
        jitter=tuple(shape.JITTER),
    )


def task(
    cfg: CfgNode, device: torch.device, test_loaders: dict, amp_dtype, memory_format
) -> DetectionTask:
    """The losses and the average precision."""
    return DetectionTask(
        device=device,
        test_loaders=test_loaders,
        masks=has_masks(cfg),
        amp_dtype=amp_dtype,
        memory_format=memory_format,
    )
