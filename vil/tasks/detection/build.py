"""Build the detection task from a config: detector, datasets, transforms."""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import to_pil_image
from yacs.config import CfgNode

from vil.config.defaults import tree
from vil.config.unused_keys import warn_unused
from vil.data.build import read_settings
from vil.data.classes import add_learned_classes
from vil.data.splits import ShownClasses
from vil.data.synthetic.scenes import NUM_TRAIN, NUM_VAL
from vil.engine.build import MEMORY_FORMATS, amp_dtype
from vil.integrations.build import build_network
from vil.models.vision_longformer import MsViT
from vil.pretrained.load_weights import Report
from vil.tasks.base import OpenData, Task
from vil.tasks.detection.cost import detector_cost
from vil.tasks.detection.data import datasets
from vil.tasks.detection.data.batch import DetectionBatch
from vil.tasks.detection.data.datasets import CocoDataset, build_detection_set
from vil.tasks.detection.data.summary import describe_empty, summarize_boxes
from vil.tasks.detection.data.transforms import train_transform
from vil.tasks.detection.detections import from_target
from vil.tasks.detection.distillation import PyramidDistillation
from vil.tasks.detection.models.detectors import DetectorConfig, build_detector
from vil.tasks.detection.models.fpn import strip_head
from vil.tasks.detection.models.weights import load_detector
from vil.tasks.detection.task import DetectionTask
from vil.tasks.detection.visualize import draw
from vil.tasks.teacher import build_teacher, refuse_cache
from vil.utils.console import printable
from vil.utils.errors import ConfigError, DataError, as_config_error
from vil.utils.plural import plural

logger = logging.getLogger(__name__)
# Config keys and sections that detectors do not use.
UNUSED = (
    "INPUT.CROP_PCT", "INPUT.INTERPOLATION", "LOSS", "FINETUNE.FINETUNE", "FINETUNE.USE_TRAIN_AUG",
    "MODEL.VIT.AVG_POOL",
    *(f"AUG.{name}" for name in tree().AUG if name != "REPEATED_AUG"),
)  # fmt: skip
UNUSED_BY = {
    "retinanet": ("DETECTION.RPN", "DETECTION.BOX", "DETECTION.MASK"),
    "faster_rcnn": ("DETECTION.MASK",),
}
UNUSED_OF_TEACHER = ("DISTILL.IMAGE_SIZE", "DISTILL.TEMPERATURE", "DISTILL.SIZES")
SYNTHETIC = "fake_boxes"  # dataset for `synthetic`
RENDERED = "the images are synthetic: the dataset scenes is reduced to those of one training step"


class Detection(DetectionTask):
    """The detection task, built from a config."""

    own_arguments = staticmethod(datasets.own_arguments)
    counted = "objects"
    has_splits = True

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        detection, model = cfg.DETECTION, cfg.DETECTION.MODEL
        images, test = detection.INPUT, detection.TEST
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
        if images.JITTER:
            warn_unused(cfg, "DETECTION.INPUT.JITTER is set", ("DETECTION.INPUT.TRAIN_SIZES",))
        masks = model == "mask_rcnn"
        super().__init__(
            device=device,
            settings=read_settings(cfg),
            metric=cfg.EVAL.METRIC,
            amp_dtype=amp_dtype(cfg.AMP.DTYPE, enabled=cfg.AMP.ENABLED),
            memory_format=MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT],
            masks=masks,
            tile=test.TILE,
            overlap=test.TILE // 4 if test.OVERLAP < 0 else test.OVERLAP,
            nms=test.NMS,
            per_image=test.PER_IMAGE,
            category_ids=detection.CATEGORY_IDS,
            print_classes=cfg.OUTPUT_PERCLASS_ACC,
            distillation=build_distillation(cfg, device),
        )
        if self.metric.name.startswith("mask") and not masks:
            raise ConfigError(
                f"EVAL.METRIC {self.metric.name} needs masks, but {model} predicts no masks: set "
                "EVAL.METRIC to box_ap"
            )
        arch = cfg.MODEL.VIT.MSVIT.ARCH
        self.cost_remark = f"A {model} on {arch}; its cost depends on the image."
        self.config = detector_config(cfg)
        self.finetune = dict(head=cfg.FINETUNE.HEAD, rule=cfg.FINETUNE.RESIZE)
        self.build_network = partial(build_detection_model, cfg)
        self.train_sizes = images.TRAIN_SIZES
        augmentation = dict(max_size=images.MAX_SIZE, flip=images.FLIP, jitter=tuple(images.JITTER))
        self.build_train_transform = partial(as_config_error(train_transform), **augmentation)
        self.keep_empty, self.group_aspects = images.KEEP_EMPTY, images.GROUP_ASPECTS
        # {dataset: (all images of its training split, {split: indices})}
        self._parts: dict[str, tuple[CocoDataset, dict[str, np.ndarray]]] = {}

    @as_config_error
    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        model = self.build_network()
        self.is_built = True
        if self.distillation is not None:
            self.distillation.fit(model.backbone)
        return model

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        return load_detector(model, path, strict=strict, **self.finetune)

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> CocoDataset:
        width = self.config.max_size
        height = min(max(self.train_sizes), width)
        transform = self.build_train_transform(sizes=[height]) if split == "train" else None
        own = dict(n=num_samples, size=width, height=height, num_classes=self.config.classes)
        masks = "segm" in self.iou_types
        return build_detection_set(SYNTHETIC, folder, split, transform, masks=masks, **own)

    @contextmanager
    def open_data(self) -> Iterator[OpenData]:
        """Context manager that opens the config's datasets to describe them, see `Task.open_data`.

        If all datasets are synthetic, their images are rendered into a temporary folder. The
        dataset `scenes` is then reduced to at most one validation image, and at most as many
        training images as one optimizer step uses, unless its training images are divided.
        """
        settings, task = self.settings, self
        sets = {*settings.train, *settings.val, *settings.test}
        rendered, is_reduced = sets <= datasets.SYNTHETIC_SETS, False
        with tempfile.TemporaryDirectory() as folder:
            if rendered:
                kwargs, is_reduced = dict(settings.kwargs), "scenes" in sets - {*settings.divided}
                step = settings.batch_size * settings.accumulate
                limits = (("train", NUM_TRAIN, step), ("val", NUM_VAL, 1))
                for name, default, most in limits if is_reduced else ():
                    count = kwargs.get(name, default)
                    kwargs[name] = min(count, most) if isinstance(count, int) else count
                task = copy(self)
                task._parts = {}
                task.settings = replace(settings, path=folder, kwargs=kwargs)
            with Task.open_data(task) as data:
                self.class_names = data.train.classes
                yield data._replace(note=RENDERED if is_reduced else "")

    def describe_images(self, dataset: CocoDataset) -> str:
        return describe_empty(dataset) if dataset.num_empty else ""

    def count_classes(self, dataset: CocoDataset) -> dict[str, int]:
        counts = np.bincount(dataset.labels, minlength=len(dataset.classes) + 1)[1:]
        return dict(zip(dataset.classes, counts.tolist()))

    def draw_batch(self, batch: DetectionBatch) -> list[tuple[Image.Image, str]]:
        names = list(self.class_names)
        return [
            (
                draw(to_pil_image(image.cpu()), from_target(target), names, scores=False),
                plural(len(target["labels"]), "object"),
            )
            for image, target in zip(batch.images, batch.targets)
        ]

    cost = staticmethod(detector_cost)
    summarize_targets = staticmethod(summarize_boxes)
    find_misfits = staticmethod(CocoDataset.find_misfits)
    resizes_to_image_size = False  # DETECTION.INPUT decides

    def open_train_set(self) -> CocoDataset:
        names = self.settings.train
        if len(names) > 1:
            sets = ", ".join(names)
            raise ConfigError(
                f"DATA.TRAIN is {sets}, but a detector trains on one set only: merge the sets"
            )
        transform = self.build_train_transform(sizes=self.train_sizes)
        dataset = self._open_part(names[0], "train", transform)
        self.check_num_classes(dataset, names[0])
        empty = [name for name, count in self.count_classes(dataset).items() if not count]
        if empty and not self.settings.is_counting:
            text = "%s: %d of %d categories have no object, such as %s: the model has them too, AP "
            text += "leaves them out"
            counts = len(empty), len(dataset.classes)
            logger.warning(text, dataset.annotations, *counts, printable(empty[0]))
        return dataset

    def open_test_set(self, name: str, split: str = "val") -> CocoDataset:
        dataset = self._open_part(name, split, None)
        is_unique = len(set(dataset.classes)) == len(dataset.classes)
        if self.settings.classes != "by_position" and is_unique:
            add_learned_classes(dataset, self.class_names, name)
        self.check_num_classes(dataset, name)
        return dataset

    def _check(self, dataset: CocoDataset, name: str, *, match: bool = True) -> None:
        """Also report annotations that do not fit their images.

        Raises DataError if most annotations or images of a training set do not fit.
        """
        super()._check(dataset, name, match=match)
        for misfit in self.find_misfits(dataset, *dataset.sample_sizes()):
            text = f"{misfit} (vil detect check lists them)"
            if misfit.is_common and dataset.split == "train":
                raise DataError(f"{dataset.annotations} cannot be used for training: {text}")
            logger.warning(f"{dataset.annotations}: {text}")

    def _open_part(self, name: str, split: str, transform: Callable | None) -> CocoDataset:
        """Open the split "train", "val" or "test" of the dataset `name`, or the part of its
        training split that takes this place, for example by DATA.VAL_FRACTION."""
        if split not in self.settings.divided.get(name, ()):
            return self._open(name, split, transform, keep_empty=self.keep_empty)
        if name not in self._parts:
            dataset = self._open(name, "train", None, keep_empty=True)
            shown = ShownClasses(dataset, dataset.count_boxes() > 0)
            indices = self.settings.split_indices(name, shown)
            self._parts[name] = dataset, indices
        dataset, indices = self._parts[name]
        part = dataset.select(indices[split], split, keep_empty=self.keep_empty)
        part.transform = transform
        return part

    def _open(
        self, name: str, split: str, transform: Callable | None, *, keep_empty: bool
    ) -> CocoDataset:
        settings = self.settings
        if settings.targetmap:
            raise ConfigError("DATA.TARGETMAP is for classifiers: leave it empty for detectors")
        with settings.arguments(name, self.own_arguments(name)) as own:
            own |= dict(masks="segm" in self.iou_types, keep_empty=keep_empty)
            own |= dict(quiet=settings.is_counting)
            dataset = build_detection_set(name, settings.path, split, transform, **own)
        dataset.value_range, dataset.background = settings.value_range, settings.background
        if not self.group_aspects:
            dataset.groups = None
        return dataset


def detector_config(cfg: CfgNode) -> DetectorConfig:
    """Read the settings of a detector."""
    own, images, test = cfg.DETECTION, cfg.DETECTION.INPUT, cfg.DETECTION.TEST
    # most have the name of their config key: `box_samples` is the value of DETECTION.BOX.SAMPLES
    settings = {
        f"{section}_{key}".lower(): own[section][key]
        for section in ("FPN", "ANCHORS", "RPN", "BOX", "MASK")
        for key in own[section]
    }
    settings |= dict(score=test.SCORE, nms=test.NMS, per_image=test.PER_IMAGE)
    settings |= dict(test_size=images.TEST_SIZE, max_size=images.MAX_SIZE)
    settings |= dict(mean=cfg.INPUT.MEAN, std=cfg.INPUT.STD, version=own.HEADS)
    return DetectorConfig(cfg.DATA.NUM_CLASSES, **settings)


def build_detection_model(cfg: CfgNode) -> nn.Module:
    """Build the detector of a config, with random weights."""
    if cfg.MODEL.ARCH != "msvit":
        raise ConfigError(f"DETECTION.MODEL needs MODEL.ARCH msvit, not {cfg.MODEL.ARCH}")
    network, config = build_network(cfg, cfg.DATA.NUM_CLASSES), detector_config(cfg)
    if needed := missing_positions(cfg, network, config.max_size):
        raise ConfigError(
            f"INPUT.IMAGE_SIZE {cfg.INPUT.IMAGE_SIZE} is too small: for images of "
            f"DETECTION.INPUT.MAX_SIZE {config.max_size} pixels, set INPUT.IMAGE_SIZE to at least "
            f"{needed}, or set MODEL.VIT.POS_RESIZE to 'interpolate'"
        )
    return build_detector(cfg.DETECTION.MODEL, strip_head(network), config)


def build_distillation(cfg: CfgNode, device: torch.device) -> PyramidDistillation | None:
    """Build the loss of a teacher's pyramid, if the config has a teacher."""
    if not cfg.DISTILL.TEACHER:
        warn_unused(cfg, "DISTILL.TEACHER is empty", ("DISTILL",))
        return None
    refuse_cache(cfg)
    warn_unused(cfg, f"TASK is {cfg.TASK}", UNUSED_OF_TEACHER)
    if cfg.DISTILL.SHARE == 1:
        logger.warning("DISTILL.SHARE 1: the heads of the detector learn nothing, set it below 1")

    def build(saved: CfgNode, num_outputs: int, path: Path | None, cfg: CfgNode) -> nn.Module:
        model, size = build_detection_model(saved), cfg.DETECTION.INPUT.MAX_SIZE
        if missing_positions(saved, model.backbone.body, size):
            stride = model.backbone.divisor
            raise ConfigError(
                f"DISTILL.TEACHER {cfg.DISTILL.TEACHER} takes images of at most "
                f"{saved.INPUT.IMAGE_SIZE // stride * stride} pixels, but DETECTION.INPUT.MAX_SIZE "
                f"is {size}: set it to at most that"
            )
        if path:
            load_detector(model, path, rule=cfg.FINETUNE.RESIZE, strict=True)
        return model

    teacher = build_teacher(cfg, device, networks={"detection": build}, image_size=None)
    return PyramidDistillation(teacher, share=cfg.DISTILL.SHARE)


def missing_positions(cfg: CfgNode, network: MsViT, max_size: int) -> int:
    """Return the INPUT.IMAGE_SIZE that images of `max_size` pixels need, if position embeddings are
    too small for them, else 0.

    Embeddings that are cropped to the size of an image (MODEL.VIT.POS_RESIZE crop) support images
    of at most INPUT.IMAGE_SIZE pixels. Interpolated ones support any size. network: the model of
    the config.
    """
    stride = network.strides[-1]
    needed = -(-max_size // stride) * stride
    is_cropped = cfg.MODEL.VIT.POS_RESIZE == "crop" and any(s.absolute for s in network.specs)
    return needed if is_cropped and needed > cfg.INPUT.IMAGE_SIZE else 0
