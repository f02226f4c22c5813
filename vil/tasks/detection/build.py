"""Build the detection task from a config: detector, datasets, transforms."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import to_pil_image
from yacs.config import CfgNode

from vil.config.defaults import tree
from vil.config.unused_keys import warn_unused
from vil.data import build as data
from vil.data.synthetic.scenes import NUM_TRAIN, NUM_VAL
from vil.integrations.build import build_network
from vil.models.vision_longformer import MsViT
from vil.pretrained.load_weights import Report
from vil.tasks.base import OpenData, Task
from vil.tasks.detection.cost import detector_cost
from vil.tasks.detection.data import datasets
from vil.tasks.detection.data.batch import DetectionBatch
from vil.tasks.detection.data.datasets import CocoDataset, build_detection_set
from vil.tasks.detection.data.summary import summarize_boxes
from vil.tasks.detection.data.transforms import train_transform
from vil.tasks.detection.detections import from_target
from vil.tasks.detection.models.detectors import DetectorConfig, build_detector
from vil.tasks.detection.models.fpn import strip_head
from vil.tasks.detection.models.weights import load_detector
from vil.tasks.detection.task import DetectionTask
from vil.tasks.detection.visualize import draw
from vil.utils.errors import ConfigError, as_config_error

# Config keys and sections that detectors do not use.
UNUSED = (
    "INPUT.CROP_PCT", "INPUT.INTERPOLATION", "LOSS", "FINETUNE.FINETUNE", "FINETUNE.USE_TRAIN_AUG",
    "MODEL.VIT.AVG_POOL", *(f"AUG.{name}" for name in tree().AUG if name != "REPEATED_AUG"),
)  # fmt: skip
UNUSED_BY = {
    "retinanet": ("DETECTION.RPN", "DETECTION.BOX", "DETECTION.MASK"),
    "faster_rcnn": ("DETECTION.MASK",),
}
SYNTHETIC = "fake_boxes"  # dataset for `synthetic`
RENDERED = "the images are synthetic: the dataset scenes is reduced to those of one training step"


class Detection(DetectionTask):
    """The detection task, built from a config."""

    own_arguments = staticmethod(datasets.own_arguments)
    counted = "objects"

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        model, test = cfg.DETECTION.MODEL, cfg.DETECTION.TEST
        if not model:
            raise ConfigError(
                "TASK detection needs a detector: set DETECTION.MODEL to mask_rcnn, faster_rcnn or "
                "retinanet"
            )
        if cfg.INPUT.CHANNELS != 3:
            raise ConfigError(
                f"INPUT.CHANNELS is {cfg.INPUT.CHANNELS}, but detectors take RGB images only: set "
                "INPUT.CHANNELS to 3"
            )
        warn_unused(cfg, f"{model} is a detector", UNUSED)
        warn_unused(cfg, f"{model} has no such part", UNUSED_BY.get(model, ()))
        if cfg.DETECTION.INPUT.JITTER:
            warn_unused(cfg, "DETECTION.INPUT.JITTER is set", ("DETECTION.INPUT.TRAIN_SIZES",))
        overlap = test.TILE // 4 if test.OVERLAP < 0 else test.OVERLAP
        tiling = dict(tile=test.TILE, overlap=overlap, nms=test.NMS, per_image=test.PER_IMAGE)
        options = dict(masks=model == "mask_rcnn", print_classes=cfg.OUTPUT_PERCLASS_ACC)
        super().__init__(cfg=cfg, device=device, **options, **tiling)
        arch = cfg.MODEL.VIT.MSVIT.ARCH
        self.cost_remark = f"A {model} on {arch}; its cost depends on the image."
        if self.metric.name.startswith("mask") and not options["masks"]:
            raise ConfigError(
                f"EVAL.METRIC {self.metric.name} needs masks, but {model} predicts no masks: set "
                "EVAL.METRIC to box_ap"
            )

    @as_config_error
    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        cfg = self.cfg
        if cfg.MODEL.ARCH != "msvit":
            raise ConfigError(f"DETECTION.MODEL needs MODEL.ARCH msvit, not {cfg.MODEL.ARCH}")
        network = build_network(cfg, cfg.DATA.NUM_CLASSES)
        check_positions(cfg, network)
        return build_detector(cfg.DETECTION.MODEL, strip_head(network), detector_config(cfg))

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        finetune = self.cfg.FINETUNE
        return load_detector(model, path, head=finetune.HEAD, rule=finetune.RESIZE, strict=strict)

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> CocoDataset:
        width = self.cfg.DETECTION.INPUT.MAX_SIZE
        height = min(max(self.cfg.DETECTION.INPUT.TRAIN_SIZES), width)
        transform = build_train_transform(self.cfg, sizes=[height]) if split == "train" else None
        own = dict(n=num_samples, size=width, height=height, num_classes=self.cfg.DATA.NUM_CLASSES)
        masks = "segm" in self.iou_types
        return build_detection_set(SYNTHETIC, folder, split, transform, masks=masks, **own)

    @contextmanager
    def open_data(self) -> Iterator[OpenData]:
        """Context manager that opens the config's datasets to describe them, see `Task.open_data`.

        If all datasets are synthetic, their images are rendered into a temporary folder. The
        dataset `scenes` is then reduced to a few images, see `_render_few`.
        """
        with tempfile.TemporaryDirectory() as folder:
            few = _render_few(self.cfg, folder)
            rendered = few is not self.cfg
            task = type(self)(few, self.device) if rendered else self
            with Task.open_data(task) as data:
                self.class_names = data.train.classes
                is_reduced = rendered and "scenes" in (*few.DATA.TRAIN, *few.DATA.TEST)
                yield data._replace(note=RENDERED if is_reduced else "")

    def count_classes(self, dataset: CocoDataset) -> dict[str, int]:
        counts = np.bincount(dataset.labels, minlength=len(dataset.classes) + 1)[1:]
        return dict(zip(dataset.classes, counts.tolist()))

    def draw_batch(self, batch: DetectionBatch) -> list[tuple[Image.Image, str]]:
        names = list(self.class_names)
        return [
            (
                draw(to_pil_image(image.cpu()), from_target(target), names, scores=False),
                f"{len(target['labels'])} objects",
            )
            for image, target in zip(batch.images, batch.targets)
        ]

    cost = staticmethod(detector_cost)
    summarize_targets = staticmethod(summarize_boxes)
    resizes_to_image_size = False  # DETECTION.INPUT decides

    def open_train_set(self) -> CocoDataset:
        names = self.cfg.DATA.TRAIN
        if len(names) > 1:
            sets = ", ".join(names)
            raise ConfigError(
                f"DATA.TRAIN is {sets}, but a detector trains on one set only: merge the sets"
            )
        return self._open(names[0], "train", build_train_transform(self.cfg))

    def open_test_set(self, name: str) -> CocoDataset:
        return self._open(name, "val", None)

    def _open(self, name: str, split: str, transform: Callable | None) -> CocoDataset:
        cfg = self.cfg
        if cfg.DATA.TARGETMAP:
            raise ConfigError("DATA.TARGETMAP is for classifiers: leave it empty for detectors")
        with data.dataset_arguments(cfg, name, self.own_arguments(name)) as own:
            own |= dict(masks="segm" in self.iou_types, keep_empty=cfg.DETECTION.INPUT.KEEP_EMPTY)
            dataset = build_detection_set(name, cfg.DATA.PATH, split, transform, **own)
        dataset.value_range = cfg.DATA.VALUE_RANGE
        if not cfg.DETECTION.INPUT.GROUP_ASPECTS:
            dataset.groups = None
        self.check_num_classes(dataset, name)
        return dataset


def detector_config(cfg: CfgNode) -> DetectorConfig:
    """Convert a config to the settings of a detector.

    Most fields have the name of their config key. For example, `box_samples` is the value of
    DETECTION.BOX.SAMPLES.
    """
    c = cfg.DETECTION
    settings = {
        f"{section}_{key}".lower(): c[section][key]
        for section in ("FPN", "ANCHORS", "RPN", "BOX", "MASK")
        for key in c[section]
    }
    settings |= dict(score=c.TEST.SCORE, nms=c.TEST.NMS, per_image=c.TEST.PER_IMAGE)
    settings |= dict(test_size=c.INPUT.TEST_SIZE, max_size=c.INPUT.MAX_SIZE)
    settings |= dict(mean=cfg.INPUT.MEAN, std=cfg.INPUT.STD, version=c.HEADS)
    return DetectorConfig(cfg.DATA.NUM_CLASSES, **settings)


def check_positions(cfg: CfgNode, network: MsViT) -> None:
    """Raise ConfigError if the position embeddings are too small for DETECTION.INPUT.MAX_SIZE.

    Embeddings that are cropped to the size of an image (MODEL.VIT.POS_RESIZE crop) support images
    of at most INPUT.IMAGE_SIZE pixels. Interpolated ones support any size. network: the model
    without its head.
    """
    stride, largest = network.strides[-1], cfg.DETECTION.INPUT.MAX_SIZE
    needed = -(-largest // stride) * stride
    cropped = cfg.MODEL.VIT.POS_RESIZE == "crop" and any(s.absolute for s in network.specs)
    if cropped and needed > cfg.INPUT.IMAGE_SIZE:
        raise ConfigError(
            f"INPUT.IMAGE_SIZE {cfg.INPUT.IMAGE_SIZE} is too small: for images of "
            f"DETECTION.INPUT.MAX_SIZE {largest} pixels, set INPUT.IMAGE_SIZE to at least "
            f"{needed}, or set MODEL.VIT.POS_RESIZE to 'interpolate'"
        )


@as_config_error
def build_train_transform(cfg: CfgNode, sizes: list[int] | None = None) -> Callable:
    """Build the transform of training images and their targets from the config.

    sizes: lengths of the shorter side in pixels. One of them is sampled for each image. None: use
    the value of DETECTION.INPUT.TRAIN_SIZES.
    """
    c = cfg.DETECTION.INPUT
    sizes = sizes or c.TRAIN_SIZES
    return train_transform(sizes=sizes, max_size=c.MAX_SIZE, flip=c.FLIP, jitter=tuple(c.JITTER))


def _render_few(cfg: CfgNode, folder: str) -> CfgNode:
    """Return a copy of a config that renders its synthetic datasets into `folder`.

    In the copy, the dataset `scenes` has at most one validation image, and at most as many training
    images as one optimizer step uses. If any dataset is not synthetic, returns `cfg` itself.
    """
    sets = {*cfg.DATA.TRAIN, *cfg.DATA.TEST}
    if not sets <= datasets.SYNTHETIC_SETS:
        return cfg
    few = cfg.clone()
    few.defrost()
    few.DATA.PATH = folder
    if "scenes" in sets:
        own, step = few.DATA.KWARGS, cfg.DATALOADER.BSZ * cfg.OPTIM.ACCUMULATE
        for name, default, most in (("train", NUM_TRAIN, step), ("val", NUM_VAL, 1)):
            count = own.get(name, default)
            own[name] = min(count, most) if isinstance(count, int) else count
    return few
