"""Build the segmentation task from a config: network, datasets, transforms."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image
from yacs.config import CfgNode

from vil.config.unused_keys import warn_unused
from vil.data.batch import Batch
from vil.data.build import read_settings
from vil.data.classes import add_learned_classes
from vil.data.loader import TrainLoader
from vil.data.splits import ShownClasses
from vil.engine.build import MEMORY_FORMATS, amp_dtype
from vil.engine.distributed import DistInfo, compute_on_main
from vil.integrations.build import build_network
from vil.pretrained.load_weights import Report
from vil.tasks.base import AttentionInput, trains_batch_norm
from vil.tasks.distillation.outputs import OutputDistillation
from vil.tasks.image.class_weights import balance_counts, parse_class_weights
from vil.tasks.segmentation import IGNORE, data, losses
from vil.tasks.segmentation.data import MaskDataset, build_segmentation_set
from vil.tasks.segmentation.keys import SMP
from vil.tasks.segmentation.models import (
    build_model,
    load_segmentation_weights,
    strip_classifier,
)
from vil.tasks.segmentation.predictions import OPACITY, colorize
from vil.tasks.segmentation.stream import StreamedSegmentation
from vil.tasks.segmentation.task import SegmentationTask
from vil.tasks.segmentation.transforms import (
    eval_transform,
    image_transform,
    train_transform,
)
from vil.tasks.teacher import build_teacher, refuse_cache
from vil.utils.console import printable
from vil.utils.errors import ConfigError, as_config_error

logger = logging.getLogger(__name__)
UNUSED = (  # config keys and sections that the task does not use
    "INPUT.CROP_PCT", "INPUT.INTERPOLATION", "LOSS.LOSS", "LOSS.FOCAL", "LOSS.LABEL_SMOOTHING",
    "LOSS.LOGIT_ADJUSTMENT", "AUG.SCALE", "AUG.RATIO", "AUG.MIXUP_PROB", "AUG.MIXUP", "AUG.MIXCUT",
    "AUG.MIXCUT_MINMAX", "AUG.MIXUP_MODE", "AUG.MIXUP_SWITCH_PROB", "AUG.TRANSFORM",
    *(f"AUG.TIMM_AUG.{name}" for name in ("HFLIP", "VFLIP", "RE_PROB", "RE_MODE", "RE_COUNT")),
    "MODEL.VIT.AVG_POOL", "FINETUNE.FINETUNE",
    "FINETUNE.USE_TRAIN_AUG", "DATA.TARGETMAP", "DISTILL.WEIGHTS", "DISTILL.SIZES",
)  # fmt: skip
# {whether AUG.TIMM_AUG.USE_TRANSFORM is set: keys of the augmentation of colors}
COLORS = {
    True: ("COLOR_JITTER", "AUTO_AUGMENT"),
    False: ("COLOR_JITTER", "GRAY_SCALE", "GAUSSIAN_BLUR"),
}
HEAD_ONLY = ("SEGMENTATION.CHANNELS",)
MAX_NAMED = 4  # classes that `draw_batch` names
SYNTHETIC = "fake_masks"  # dataset for `synthetic`


class Segmentation(SegmentationTask):
    """The segmentation task, built from a config."""

    own_arguments = staticmethod(data.own_arguments)
    summarize_targets = staticmethod(data.summarize_masks)

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        own, test = cfg.SEGMENTATION, cfg.SEGMENTATION.TEST
        if not own.MODEL:
            raise ConfigError(
                "TASK segmentation needs a head: set SEGMENTATION.MODEL to fpn, mlp, upernet or "
                "smp/NAME"
            )
        if cfg.INPUT.CHANNELS != 3:
            raise ConfigError(
                f"INPUT.CHANNELS is {cfg.INPUT.CHANNELS}, but TASK segmentation takes RGB images "
                "only: set INPUT.CHANNELS to 3"
            )
        warn_unused(cfg, f"TASK is {cfg.TASK}", UNUSED)
        if own.MODEL.startswith(SMP):
            warn_unused(cfg, f"{own.MODEL} has its own number of channels", HEAD_ONLY)
        # with "auto", the task is used only to open datasets
        is_counting = cfg.DATA.NUM_CLASSES == "auto"
        num_classes = 1 if is_counting else cfg.DATA.NUM_CLASSES
        if own.PALETTE and len(own.PALETTE) != 3 * num_classes and not is_counting:
            raise ConfigError(
                f"SEGMENTATION.PALETTE has {len(own.PALETTE)} numbers, but DATA.NUM_CLASSES "
                f"{num_classes} needs {3 * num_classes}: change it, or set it to []"
            )
        loss = dict(num_classes=num_classes, hard_pixels=own.HARD_PIXELS)
        self.build_loss = partial(losses.parse_loss, own.LOSS, **loss)
        self.weight_setting = cfg.LOSS.CLASS_WEIGHTS
        mean, std = list(cfg.INPUT.MEAN), list(cfg.INPUT.STD)
        self.mean, self.std, self.ignore = mean, std, own.IGNORE
        self.eval_transform = eval_transform(test.SIZE, mean=mean, std=std)
        self.build_train_transform = partial(build_train_transform, cfg)
        self.build_network = partial(build_segmentation_model, cfg)
        self.finetune = dict(head=cfg.FINETUNE.HEAD, rule=cfg.FINETUNE.RESIZE)
        # {dataset: (all images of its training split, {split: indices})}
        self._parts: dict[str, tuple[MaskDataset, dict[str, np.ndarray]]] = {}
        super().__init__(
            device=device,
            settings=read_settings(cfg),
            metric=cfg.EVAL.METRIC,
            amp_dtype=amp_dtype(cfg.AMP.DTYPE, enabled=cfg.AMP.ENABLED),
            memory_format=MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT],
            loss=self.build_loss(),
            num_classes=num_classes,
            transform=image_transform(test.SIZE, mean=mean, std=std),
            test_size=test.SIZE,
            tile=test.TILE,
            overlap=test.TILE // 4 if test.OVERLAP < 0 else test.OVERLAP,
            boundary=test.BOUNDARY,
            outputs=test.OUTPUTS,
            palette=[] if is_counting else own.PALETTE,
            print_classes=cfg.OUTPUT_PERCLASS_ACC,
            distillation=None if is_counting else build_distillation(cfg, device),
        )

    @as_config_error
    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        model = self.build_network(load_pretrained=load_pretrained)
        self.has_batch_norm, self.is_built = trains_batch_norm(model), True
        return model

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        return load_segmentation_weights(model, path, strict=strict, **self.finetune)

    @as_config_error
    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        """Build this rank's training loader, see `Task.train_loader`. Records the palette,
        and computes the class weights."""
        loader = super().train_loader(dist, **options)
        dataset, setting = loader.samples.dataset, list(self.weight_setting)
        if not self.has_palette:
            self.palette = dataset.palette
        colors = self.palette.astype(int).ravel().tolist()
        self.learned_settings = dict.fromkeys(self.learned_keys, colors)
        if setting == ["balanced"]:
            counts = compute_on_main(lambda: data.count_pixels(dataset))
            weights = torch.from_numpy(balance_counts(counts)).float()
            if absent := [dataset.classes[n] for n in np.flatnonzero(counts == 0)]:
                text = "LOSS.CLASS_WEIGHTS balanced: %d of %d classes have no pixel in the counted "
                text += "masks, such as %s, and get the weight 0"
                counts = len(absent), len(dataset.classes)
                logger.warning(text, *counts, printable(absent[0]))
        else:
            weights = parse_class_weights(setting, np.empty(0, int), self.num_classes)
        if weights is not None:
            self.loss_function = self.build_loss(class_weights=weights.to(self.device))
        if self.distillation is not None:
            # synthetic images of a dry run have other classes
            classes = loader.classes if options.get("dataset") is None else ()
            self.distillation.open(dataset, classes, load=self.is_built)
        return loader

    def find_misfits(
        self, dataset: MaskDataset, indices: np.ndarray, sizes: np.ndarray
    ) -> list[data.MaskMisfit]:
        return data.find_misfits(dataset, indices, sizes, self.settings.max_bad_fraction)

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> MaskDataset:
        settings = self.settings
        own = dict(n=num_samples, size=settings.image_size, num_classes=settings.num_classes)
        transform = self._transform(split)
        return build_segmentation_set(SYNTHETIC, folder, split, transform, **own)

    def _transform(self, split: str) -> Callable:
        return self.build_train_transform() if split == "train" else self.eval_transform

    def count_classes(self, dataset: MaskDataset) -> dict[str, int]:
        return dict(zip(dataset.classes, data.count_pixels(dataset).tolist()))

    def draw_batch(self, batch: Batch) -> list[tuple[Image.Image, str]]:
        pictures, batch = [], batch.to("cpu")
        for image, target in zip(batch.images, batch.targets):
            shown = to_pil_image(self._denormalize(image))
            present = [n for n in target.unique().tolist() if n != IGNORE]
            names = ", ".join(printable(self.class_names[n]) for n in present[:MAX_NAMED])
            colors = colorize(target.numpy(), self.palette, shown.size)
            pictures.append((Image.blend(shown, colors, OPACITY), names))
        return pictures

    def _denormalize(self, image: Tensor) -> Tensor:
        """Return a normalized image (3, H, W) with values from 0 to 1."""
        mean, std = (torch.tensor(x)[:, None, None] for x in (self.mean, self.std))
        return (image.float().cpu() * std + mean).clamp(0, 1)

    @as_config_error
    def stream_model(self, model: nn.Module) -> StreamedSegmentation:
        if self.test_size or self.tiling["tile"]:
            raise ConfigError(
                "--stream predicts the whole image at its resolution: set SEGMENTATION.TEST.SIZE "
                "and TILE to 0, and OVERLAP to -1"
            )
        return StreamedSegmentation(self, model)

    def attention_input(self, model: nn.Module, image: Any) -> AttentionInput:
        tensor = self.preprocess(image)
        shown = self._denormalize(tensor).movedim(0, -1).numpy()
        batch, valid = model.pad(tensor[None].to(self.device)), torch.tensor([tensor.shape[-2:]])
        return AttentionInput(model.attention_body, batch, shown, valid)

    # ---- datasets

    def open_train_set(self) -> MaskDataset:
        names = self.settings.train
        if len(names) > 1:
            raise ConfigError(
                f"DATA.TRAIN is {', '.join(names)}, but TASK segmentation trains on one set only: "
                "merge the sets"
            )
        dataset = self._open_part(names[0], "train")
        self.check_num_classes(dataset, names[0])
        return dataset

    def open_test_set(self, name: str, split: str = "val") -> MaskDataset:
        dataset = self._open_part(name, split)
        if self.settings.classes != "by_position":
            add_learned_classes(dataset, self.class_names, name)
        self.check_num_classes(dataset, name)
        return dataset

    def _open_part(self, name: str, split: str) -> MaskDataset:
        """Open the split "train", "val" or "test" of the dataset `name`, or the part of its
        training split that takes this place, for example by DATA.VAL_FRACTION."""
        transform = self._transform(split)
        if split not in self.settings.divided.get(name, ()):
            return self._open(name, split, transform)
        if name not in self._parts:
            dataset = self._open(name, "train", None)
            shown = ShownClasses(dataset, dataset.count().pixels > 0)
            indices = self.settings.split_indices(name, shown)
            self._parts[name] = dataset, indices
        dataset, indices = self._parts[name]
        part = dataset.select(indices[split], split)
        part.transform = transform
        return part

    def _open(self, name: str, split: str, transform: Callable | None) -> MaskDataset:
        settings = self.settings
        with settings.arguments(name, self.own_arguments(name)) as own:
            options = dict(ignore=self.ignore, quiet=settings.is_counting)
            dataset = build_segmentation_set(
                name, settings.path, split, transform, **options, **own
            )
        dataset.value_range, dataset.background = settings.value_range, settings.background
        return dataset


# ---- network and transforms


def build_segmentation_model(cfg: CfgNode, *, load_pretrained: bool = False) -> nn.Module:
    """Build the model of a config, with random weights.

    load_pretrained: load the published weights of a timm network if MODEL.PRETRAINED is set.
    """
    own = cfg.SEGMENTATION
    options = dict(load_pretrained=load_pretrained, any_size=True)
    classifier = build_network(cfg, cfg.DATA.NUM_CLASSES, **options)
    body = strip_classifier(classifier)
    return build_model(own.MODEL, body, cfg.DATA.NUM_CLASSES, channels=own.CHANNELS)


def build_distillation(cfg: CfgNode, device: torch.device) -> OutputDistillation | None:
    """Build the loss of a teacher's outputs for each pixel, if the config has a teacher."""
    own = cfg.DISTILL
    if not own.TEACHER:
        warn_unused(cfg, "DISTILL.TEACHER is empty", ("DISTILL",))
        return None
    refuse_cache(cfg)

    def build(saved: CfgNode, num_outputs: int, path: Path | None, cfg: CfgNode) -> nn.Module:
        model = build_segmentation_model(saved)
        if path:
            load_segmentation_weights(model, path, rule=cfg.FINETUNE.RESIZE)
        return model

    options = dict(networks={"segmentation": build}, image_size=cfg.INPUT.IMAGE_SIZE)
    teacher = build_teacher(cfg, device, cfg.DATA.NUM_CLASSES, **options)
    return OutputDistillation(teacher, "softmax", share=own.SHARE, temperature=own.TEMPERATURE)


def build_train_transform(cfg: CfgNode) -> Callable:
    """Build the transform of images and masks in training, with crops of INPUT.IMAGE_SIZE."""
    own, aug = cfg.SEGMENTATION.INPUT, cfg.AUG
    use_timm = aug.TIMM_AUG.USE_TRANSFORM
    chosen = aug.TIMM_AUG if use_timm else aug
    color = {name.lower(): chosen[name] for name in COLORS[use_timm]}
    other = "AUG" if use_timm else "AUG.TIMM_AUG"
    ignored = [f"{other}.{name}" for name in COLORS[not use_timm]]
    warn_unused(cfg, f"AUG.TIMM_AUG.USE_TRANSFORM is {use_timm}", ignored)
    return train_transform(
        cfg.INPUT.IMAGE_SIZE,
        mean=list(cfg.INPUT.MEAN),
        std=list(cfg.INPUT.STD),
        scale=tuple(own.SCALE),
        max_share=own.MAX_SHARE,
        hflip=own.FLIP,
        vflip=own.VFLIP,
        quarters=own.QUARTERS,
        **color,
    )
