"""The bridge from a config to detection: what `vil.build` and `vil.build_data` do where
DETECTION.MODEL is set."""

from collections.abc import Callable

import torch
from torch import nn
from yacs.config import CfgNode

from vil.detection.coco import build_detection_set, own_arguments
from vil.detection.models import Settings, build_detector
from vil.detection.pyramid import body_of
from vil.detection.task import DetectionTask
from vil.detection.transforms import train_transform
from vil.models.msvit import MsViT


def detector(cfg: CfgNode, network: MsViT) -> nn.Module:
    """The detector on a network whose head falls off."""
    c = cfg.DETECTION
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
        mask_channels=c.MASK.CHANNELS,
        mask_layers=c.MASK.LAYERS,
        score=c.TEST.SCORE,
        nms=c.TEST.NMS,
        per_image=c.TEST.PER_IMAGE,
        test_size=c.INPUT.TEST_SIZE,
        max_size=c.INPUT.MAX_SIZE,
        mean=cfg.INPUT.MEAN,
        std=cfg.INPUT.STD,
    )
    return build_detector(c.MODEL, body_of(network), settings)


__all__ = ["dataset", "detector", "own_arguments", "task", "transform_for_training"]


def has_masks(cfg: CfgNode) -> bool:
    return cfg.DETECTION.MODEL == "mask_rcnn"


def dataset(cfg: CfgNode, name: str, split: str, transform: Callable | None, own: dict):
    """A set of pictures with boxes; `own` are the arguments it takes."""
    return build_detection_set(
        name,
        cfg.DATA.PATH,
        split,
        transform,
        masks=has_masks(cfg),
        keep_empty=cfg.DETECTION.INPUT.KEEP_EMPTY,
        **own,
    )


def transform_for_training(cfg: CfgNode) -> Callable:
    """Resizing, flips and jitter; of the colours nothing is changed."""
    shape = cfg.DETECTION.INPUT
    return train_transform(
        sizes=shape.TRAIN_SIZES,
        max_size=shape.MAX_SIZE,
        flip=shape.FLIP,
        jitter=tuple(shape.JITTER) or None,
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
