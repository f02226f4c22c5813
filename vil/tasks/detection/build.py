"""From a config to the detection task: detector, data sets, transforms, evaluation."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from yacs.config import CfgNode

from vil.builders import data
from vil.builders.cost import CostRow
from vil.builders.device import amp_dtype, memory_format
from vil.builders.model import build_network
from vil.config.access import warn_unused
from vil.config.defaults import tree
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.synthetic.scenes import NUM_TRAIN, NUM_VAL
from vil.engine.distributed import DistInfo
from vil.models.vision_longformer import MsViT
from vil.pretrained.load_weights import Report
from vil.tasks.detection.cost import detector_cost
from vil.tasks.detection.data.datasets import (
    DRAWN,
    CocoDataset,
    build_detection_set,
    own_arguments,
)
from vil.tasks.detection.data.transforms import train_transform
from vil.tasks.detection.models.detectors import DetectorConfig, build_detector
from vil.tasks.detection.models.fpn import body_of
from vil.tasks.detection.models.weights import load_detector
from vil.tasks.detection.task import DetectionTask
from vil.utils.errors import ConfigError, as_config_error

# Keys, and nodes of keys, that a detector does not read.
UNREAD = (
    "INPUT.CROP_PCT", "INPUT.INTERPOLATION", "LOSS", "FINETUNE.FINETUNE", "FINETUNE.USE_TRAIN_AUG",
    "MODEL.VIT.AVG_POOL", *(f"AUG.{name}" for name in tree("AUG") if name != "REPEATED_AUG"),
)  # fmt: skip
# Nodes of keys that a kind of detector does not read.
UNREAD_BY = {
    "retinanet": ("DETECTION.RPN", "DETECTION.BOX", "DETECTION.MASK"),
    "faster_rcnn": ("DETECTION.MASK",),
}
SYNTHETIC = "fake_boxes"  # the data set of synthetic images


class Detection(DetectionTask):
    """The detection task of a config."""

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        kind, test = cfg.DETECTION.MODEL, cfg.DETECTION.TEST
        if not kind:
            raise ConfigError("TASK detection: set DETECTION.MODEL")
        warn_unused(cfg, f"{kind} is a detector", UNREAD)
        warn_unused(cfg, f"{kind} has no such part", UNREAD_BY.get(kind, ()))
        if cfg.DETECTION.INPUT.JITTER:
            warn_unused(cfg, "DETECTION.INPUT.JITTER is set", ("DETECTION.INPUT.TRAIN_SIZES",))
        super().__init__(
            device=device,
            amp_dtype=amp_dtype(cfg),
            memory_format=memory_format(cfg),
            masks=kind == "mask_rcnn",
            tile=test.TILE,
            overlap=test.TILE // 4 if test.OVERLAP < 0 else test.OVERLAP,
            nms=test.NMS,
            per_image=test.PER_IMAGE,
            print_classes=cfg.OUTPUT_PERCLASS_ACC,
        )
        self.cfg = cfg

    @as_config_error
    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        cfg = self.cfg
        if cfg.MODEL.ARCH != "msvit":
            raise ConfigError(
                f"DETECTION.MODEL stands on msvit, not on MODEL.ARCH {cfg.MODEL.ARCH}"
            )
        network = build_network(cfg, cfg.DATA.NUM_CLASSES)
        refuse_few_positions(cfg, network)
        return build_detector(cfg.DETECTION.MODEL, body_of(network), detector_config(cfg))

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        finetune = self.cfg.FINETUNE
        return load_detector(model, path, head=finetune.HEAD, rule=finetune.RESIZE, whole=strict)

    def train_loader(
        self, dist: DistInfo, *, bad_file: Path | None = None, dataset: CocoDataset | None = None
    ) -> TrainLoader:
        open_train = (lambda: dataset) if dataset is not None else self._open_train_set
        return data.build_train_loader(self.cfg, dist, self.device, open_train, bad_file)

    @as_config_error
    def test_loaders(
        self,
        dist: DistInfo,
        *,
        bad_file: Path | None = None,
        datasets: Mapping[str, CocoDataset] | None = None,
    ) -> dict[str, EvalLoader]:
        if datasets is not None:
            self.test_sets = {
                name: data.build_eval_loader(self.cfg, dist, self.device, dataset, bad_file)
                for name, dataset in datasets.items()
            }
            return self.test_sets
        data.check_dataset_arguments(self.cfg, own_arguments)
        self.test_sets = data.build_test_loaders(
            self.cfg, dist, self.device, self._open_test_set, bad_file
        )
        return self.test_sets

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> CocoDataset:
        """The largest images that training may see."""
        shape = self.cfg.DETECTION.INPUT
        side = min(max(shape.TRAIN_SIZES), shape.MAX_SIZE)
        return build_detection_set(
            SYNTHETIC,
            folder,
            split,
            build_train_transform(self.cfg, sizes=[side]) if split == "train" else None,
            masks="segm" in self.kinds,
            n=num_samples,
            size=shape.MAX_SIZE,
            height=side,
            num_classes=self.cfg.DATA.NUM_CLASSES,
        )

    def check_data(self) -> None:
        """Of sets that are rendered, open a few images in a folder that is removed again."""
        with tempfile.TemporaryDirectory() as folder:
            few = Detection(_render_few(self.cfg, folder), self.device)
            few.train_loader(DistInfo())
            few.test_loaders(DistInfo())

    def cost(self, model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
        return detector_cost(model, size)

    def _open_train_set(self) -> CocoDataset:
        cfg = self.cfg
        if len(cfg.DATA.TRAIN) > 1:
            raise ConfigError(
                f"DATA.TRAIN {', '.join(cfg.DATA.TRAIN)}: a detector trains on one set; "
                "join the files"
            )
        data.check_dataset_arguments(cfg, own_arguments)
        return self._open(cfg.DATA.TRAIN[0], "train", build_train_transform(cfg))

    def _open_test_set(self, name: str) -> CocoDataset:
        return self._open(name, "val", None)

    def _open(self, name: str, split: str, transform: Callable | None) -> CocoDataset:
        cfg = self.cfg
        if cfg.DATA.TARGETMAP:
            raise ConfigError(
                "DATA.TARGETMAP is for classifiers: leave it empty with DETECTION.MODEL"
            )
        own = data.dataset_arguments(cfg, own_arguments(name))
        with data.refused_arguments(cfg, name):
            dataset = build_detection_set(
                name,
                cfg.DATA.PATH,
                split,
                transform,
                masks="segm" in self.kinds,
                keep_empty=cfg.DETECTION.INPUT.KEEP_EMPTY,
                **own,
            )
        if not cfg.DETECTION.INPUT.GROUP_ASPECTS:
            dataset.groups = None
        data.check_num_classes(cfg, dataset, name)
        return dataset


def detector_config(cfg: CfgNode) -> DetectorConfig:
    """The parts of the detector."""
    c = cfg.DETECTION
    return DetectorConfig(
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


def refuse_few_positions(cfg: CfgNode, network: MsViT) -> None:
    """Raise ConfigError where absolute positions, made for INPUT.IMAGE_SIZE, are cropped and would
    not reach to the end of the largest image."""
    stride, largest = network.strides[-1], cfg.DETECTION.INPUT.MAX_SIZE
    needed = -(-largest // stride) * stride
    cropped = cfg.MODEL.VIT.POS_RESIZE == "crop" and any(s.absolute for s in network.specs)
    if cropped and needed > cfg.INPUT.IMAGE_SIZE:
        raise ConfigError(
            f"INPUT.IMAGE_SIZE {cfg.INPUT.IMAGE_SIZE}: images of DETECTION.INPUT.MAX_SIZE "
            f"{largest} pixels need positions for {needed} (or MODEL.VIT.POS_RESIZE interpolate)"
        )


@as_config_error
def build_train_transform(cfg: CfgNode, sizes: list[int] | None = None) -> Callable:
    """Resize, flip and jitter a training image with its boxes; colors stay."""
    shape = cfg.DETECTION.INPUT
    return train_transform(
        sizes=sizes or shape.TRAIN_SIZES,
        max_size=shape.MAX_SIZE,
        flip=shape.FLIP,
        jitter=tuple(shape.JITTER),
    )


def _render_few(cfg: CfgNode, folder: str) -> CfgNode:
    """The config with sets in `folder` of no more images than a training step takes, if all of its
    sets are rendered."""
    sets = {*cfg.DATA.TRAIN, *cfg.DATA.TEST}
    if not sets <= {*DRAWN}:
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
