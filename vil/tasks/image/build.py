"""Build the image tasks from a config: targets, transforms, network, datasets, mixup."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import to_pil_image
from yacs.config import CfgNode

from vil.config.defaults import leaves
from vil.config.unused_keys import warn_unused
from vil.data import TRANSFORMS, build_dataset, find_source, is_numbered, own_arguments
from vil.data.bands import PIL_CHANNELS, rgb_channels
from vil.data.batch import Batch
from vil.data.build import read_settings
from vil.data.classes import add_learned_classes, match_classes, read_class_mapping
from vil.data.dataset import ImageDataset
from vil.data.datasets.composed import ConcatImageDataset, Subset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.mixup import Mix
from vil.data.pixels import loader_transform
from vil.data.splits import warn_shared
from vil.data.transforms import build_transform, eval_transform, train_transform
from vil.engine.build import MEMORY_FORMATS, amp_dtype
from vil.engine.distributed import DistInfo
from vil.integrations.build import build_network
from vil.pretrained.load_weights import Report, load_weights, select_classes
from vil.tasks.base import AttentionInput, Datasets, ImageMeta, trains_batch_norm
from vil.tasks.distillation.outputs import OutputDistillation
from vil.tasks.image import LOSSES
from vil.tasks.image.class_metrics import metric_names
from vil.tasks.image.classes import Classes
from vil.tasks.image.labels import Labels
from vil.tasks.image.losses import build_loss
from vil.tasks.image.numbers import Numbers
from vil.tasks.image.task import ImageTask
from vil.tasks.teacher import IMAGE_NETWORKS, BuildNetwork, build_image_network, build_teacher
from vil.tasks.weight_files import recorded_values
from vil.utils.console import printable
from vil.utils.errors import ConfigError, DataError, as_config_error
from vil.utils.safe_files import path_below

logger = logging.getLogger(__name__)

INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
# {whether timm's transform is used: keys of augmentations that are applied to RGB images only}
RGB_ONLY = {
    True: ("AUG.TIMM_AUG.COLOR_JITTER", "AUG.TIMM_AUG.AUTO_AUGMENT"),
    False: ("AUG.COLOR_JITTER", "AUG.GRAY_SCALE", "AUG.GAUSSIAN_BLUR"),
}
# Keys and sections of the transform of training images.
AUGMENTATION = ("AUG.SCALE", "AUG.RATIO", "AUG.TRANSFORM", "AUG.TIMM_AUG", *RGB_ONLY[False])
# Keys in AUG.TIMM_AUG that set arguments of `train_transform`.
FLIPS = ("HFLIP", "VFLIP")  # of AUG.TIMM_AUG, for both transforms
TIMM_KEYS = ("COLOR_JITTER", "RE_PROB", "RE_MODE", "RE_COUNT", "AUTO_AUGMENT")
# keys that need AUG.MIXUP_PROB
MIXUP = (
    *("AUG.MIXUP", "AUG.MIXCUT", "AUG.MIXCUT_MINMAX"),
    *("AUG.MIXUP_MODE", "AUG.MIXUP_SWITCH_PROB"),
)
SYNTHETIC = "fake"  # dataset for `ConfiguredTask.synthetic`
# {`ImageDataset.target_type`: description of the targets in messages}
TARGETS = {"class": "one class", "labels": "a set of labels", "numbers": "numbers"}


class ConfiguredTask(ImageTask):
    """Image task of a config, which also builds the network and opens the datasets.

    target_keys: {argument of `kind`: config key that sets it}.
    unused: config keys and sections that the task does not use.
    has_mixup: whether the task supports mixup and cutmix.
    has_teacher: whether the task can learn from DISTILL.TEACHER.
    """

    target_keys: Mapping[str, str] = {}
    unused: Sequence[str] = ()
    has_mixup = False
    has_teacher = False

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device, **own: Any):
        """Read the config. own: additional arguments of `kind`."""
        warn_unused(cfg, f"TASK is {cfg.TASK}", self.unused)
        if cfg.AUG.MIXUP_PROB > 0 and not self.has_mixup:
            raise ConfigError(
                f"TASK {cfg.TASK} does not support mixup and cutmix: set AUG.MIXUP_PROB to 0"
            )
        if not self.has_mixup:
            warn_unused(cfg, f"TASK is {cfg.TASK}", MIXUP)
        # with "auto", the task is used only to open datasets
        num_outputs = 1 if cfg.DATA.NUM_CLASSES == "auto" else cfg.DATA.NUM_CLASSES
        values = leaves(cfg)
        own |= {argument: values[key] for argument, key in self.target_keys.items()}
        target = self.kind(num_outputs, device=device, **own)
        images = transform_settings(cfg)
        self.mean, self.std = images["mean"], images["std"]
        size, channels = cfg.INPUT.IMAGE_SIZE, cfg.INPUT.CHANNELS
        transform = partial(eval_transform, size, channels=channels, **images)
        # built later, because a command may need only one of them
        self.build_train_transform = partial(build_train_transform, cfg, images)
        if self.has_teacher and not cfg.DISTILL.TEACHER:
            warn_unused(cfg, "DISTILL.TEACHER is empty", ("DISTILL",))
        elif self.has_teacher and cfg.DISTILL.CACHE:  # the same pixels in every epoch
            warn_unused(cfg, "DISTILL.CACHE is set", AUGMENTATION)
            self.build_train_transform = transform
        self.build_network = partial(build_network, cfg, cfg.DATA.NUM_CLASSES)
        self.finetune = dict(head=cfg.FINETUNE.HEAD, rule=cfg.FINETUNE.RESIZE)
        self._parts: dict[str, dict[str, np.ndarray]] = {}  # {dataset: {split: indices}}
        super().__init__(
            target,
            device=device,
            settings=read_settings(cfg),
            metric=cfg.EVAL.METRIC,
            amp_dtype=amp_dtype(cfg.AMP.DTYPE, enabled=cfg.AMP.ENABLED),
            memory_format=MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT],
            transform=transform(),
            crop_transform=transform(crop_pct=1.0),
            distillation=self.build_distillation(cfg, device),
        )
        if cfg.DATA.NUM_CLASSES != "auto":
            self.check_outputs(num_outputs)

    def build_distillation(self, cfg: CfgNode, device: torch.device) -> OutputDistillation | None:
        """Build the loss of a teacher's outputs, if the config has a teacher."""
        if not (cfg.DISTILL.TEACHER and self.has_teacher) or cfg.DATA.NUM_CLASSES == "auto":
            return None
        options = dict(share=cfg.DISTILL.SHARE, temperature=cfg.DISTILL.TEMPERATURE)
        teacher = build_teacher(cfg, device, cfg.DATA.NUM_CLASSES, networks=self.teacher_networks())
        return OutputDistillation(teacher, self.kind.activation, **options)

    def teacher_networks(self) -> Mapping[str, BuildNetwork]:
        """Return the tasks of runs whose network may be the teacher, see `build_teacher`."""
        return IMAGE_NETWORKS

    def check_outputs(self, num_outputs: int) -> None:
        """Raise ConfigError if a setting does not fit the number of outputs of the network."""

    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        model = self.build_network(load_pretrained=load_pretrained)
        self.has_batch_norm, self.is_built = trains_batch_norm(model), True
        return model

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        # strict is ignored: weights must be complete, except for a head replaced by FINETUNE.HEAD
        return load_weights(model, path, **self.finetune)

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> ImageDataset:
        transform = self.build_train_transform() if split == "train" else self.transform
        return build_dataset(
            SYNTHETIC,
            folder,
            split,
            loader_transform(transform),
            n=num_samples,
            size=self.settings.image_size,
            num_classes=self.settings.num_classes,
            target_type=self.target_type,
            channels=self.settings.channels,
        )

    def draw_batch(self, batch: Batch) -> list[tuple[Image.Image, str]]:
        mean, std = (torch.tensor(x)[:, None, None] for x in (self.mean, self.std))
        images = batch.to("cpu").images.float() * std + mean  # (B, C, H, W)
        return [
            (to_pil_image(image[:3].clamp(0, 1)), self.format_target(target))
            for image, target in zip(images, batch.targets)
        ]

    def attention_input(self, model: nn.Module, image: Any) -> AttentionInput:
        tensor = self.preprocess(image)
        output = self.run(model, [tensor])
        (prediction,) = self.postprocess(output, [ImageMeta("", tensor.shape[-2:])])
        mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (self.mean, self.std))
        shown = rgb_channels((tensor * std + mean).clamp(0, 1)).permute(1, 2, 0).numpy()
        caption = self.target.caption(prediction, self.label)
        return AttentionInput(model, tensor[None].to(self.device), shown, caption=caption)

    def open_train_set(self) -> ImageDataset:
        """Open the sets in DATA.TRAIN, as one dataset."""
        names, transform = self.settings.train, self.build_train_transform()
        sets = [self._open_part(name, "train", transform) for name in names]
        for name, other in zip(names[1:], sets[1:]):
            by_position = self.settings.classes == "by_position"
            match_classes(other, sets[0].classes, name, by_position=by_position)
        dataset = sets[0] if len(sets) == 1 else ConcatImageDataset(sets, names)
        if len(sets) > 1 and self._parts and not self.settings.is_counting:
            held_out = {
                name: Subset(dataset.dataset, np.concatenate(rest), "val")
                for name, dataset in zip(names, sets)
                if (parts := self._parts.get(name))
                and (rest := [rows for split, rows in parts.items() if split != "train"])
            }
            warn_shared(held_out, dict(zip(names, sets)), self.settings.group_by)
        source = f"DATA.TRAIN {', '.join(names)}"
        self.check_num_classes(dataset, ", ".join(names))
        if dataset.weights is not None:
            if not dataset.weights.any():
                raise DataError(f"{source}: all sample weights are 0")
            if not self.settings.is_counting:
                logger.warning("%s: the column or field of weights is used in the loss", source)
        present = np.unique(dataset.targets) if dataset.target_type == "class" else ()
        if len(present) == 1 and not self.settings.is_counting:
            text = "%s: all images have the same class, %s, so there is nothing to learn: check "
            text += "the level of the class folders, or the column of labels"
            logger.warning(text, source, printable(dataset.classes[present[0]]))
        return dataset

    def open_test_set(self, name: str, split: str = "val") -> ImageDataset:
        dataset = self._open_part(name, split, self.transform)
        if not self.settings.targetmap:
            if self._is_for_evaluation(name) and self.settings.classes != "by_position":
                add_learned_classes(dataset, self.class_names, name)
            self.check_num_classes(dataset, name)
        counts = self.count_classes(dataset)
        if empty := [class_name for class_name, count in counts.items() if not count]:
            text = "%s: %d of %d classes have no image, such as %s: means over classes ignore them"
            logger.warning(text, name, len(empty), len(counts), printable(empty[0]))
        return dataset

    def _is_for_evaluation(self, name: str) -> bool:
        """Return whether a dataset takes the argument `all_rows`, is not in DATA.TRAIN, and not
        both in DATA.VAL and DATA.TEST.

        For such a dataset, `all_rows` is True by default: without splits, all images are used.
        """
        settings, source = self.settings, find_source(name)
        train, val, test = (
            source in map(find_source, names)
            for names in (settings.train, settings.val, settings.test)
        )
        return "all_rows" in own_arguments(name) and not (train or (val and test))

    def _open_part(self, name: str, split: str, transform: Callable) -> ImageDataset:
        """Open the split "train", "val" or "test" of the dataset `name`.

        The config may take this split from the dataset's training split, for example by
        DATA.VAL_FRACTION. The result is then a part of the training split. transform: function that
        is applied to each image.
        """
        if split not in self.settings.divided.get(name, ()):
            return self._open(name, split, transform)
        dataset = self._open(name, "train", transform)
        if name not in self._parts:
            self._parts[name] = self.settings.split_indices(name, dataset)
        return Subset(dataset, self._parts[name][split], split)

    def _open(self, name: str, split: str, transform: Callable) -> ImageDataset:
        settings, taken = self.settings, own_arguments(name)
        with settings.arguments(name, taken) as own:
            is_mapped = split != "train" and settings.targetmap
            is_free = is_mapped or self.accepts_any_classes or settings.num_classes == "auto"
            if is_numbered(name) and not is_free:
                own.setdefault("num_classes", settings.num_classes)
            if "target_type" in taken and self.target_type:
                own["target_type"] = self.target_type
            if self._is_for_evaluation(name):
                own.setdefault("all_rows", True)
            if "channels" in taken:
                own["channels"] = settings.channels
            elif settings.channels not in PIL_CHANNELS:
                raise ConfigError(
                    f"INPUT.CHANNELS is {settings.channels}, but {name} has RGB images only: set "
                    "INPUT.CHANNELS to 1 or 3"
                )
            dataset = build_dataset(name, settings.path, split, loader_transform(transform), **own)
        if self.target_type and dataset.target_type != self.target_type:
            raise DataError(
                f"{name} has {TARGETS[dataset.target_type]} per image, but TASK {settings.task} "
                f"needs {TARGETS[self.target_type]} per image: use another dataset or TASK"
            )
        dataset.value_range, dataset.channels = settings.value_range, settings.channels
        dataset.background = settings.background
        return dataset


class Classification(ConfiguredTask):
    """Classification of images with one class each, built from a config."""

    kind = Classes
    target_keys = {
        "label_smoothing": "LOSS.LABEL_SMOOTHING",
        "per_class": "OUTPUT_PERCLASS_ACC",
        "weight_setting": "LOSS.CLASS_WEIGHTS",
        "logit_adjustment": "LOSS.LOGIT_ADJUSTMENT",
    }
    output_formats = Classes.formats
    complete_formats = ("probabilities",)
    has_mixup = has_teacher = True

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        chosen = cfg.LOSS.LOSS
        for name, entry in LOSSES.items():
            if name != chosen:
                warn_unused(cfg, f"LOSS.LOSS is not {name}", entry.key_names.values())
        own = LOSSES[chosen].read_settings(leaves(cfg)) if chosen in LOSSES else {}
        super().__init__(cfg, device, loss=build_loss(chosen, **own))
        self.build_mix = partial(build_mix, cfg)

    def check_outputs(self, num_outputs: int) -> None:
        targetmap, metric = self.settings.targetmap, self.metric.name
        names = metric_names(num_outputs, is_mapped=bool(targetmap))
        if metric not in names:
            raise ConfigError(
                f"EVAL.METRIC {metric} is not computed with "
                f"{'DATA.TARGETMAP' if targetmap else f'DATA.NUM_CLASSES {num_outputs}'}: set "
                f"EVAL.METRIC to one of {', '.join(names[:-1])}"
            )

    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        mix = self.build_mix()
        self.target.mix = mix and partial(mix, rank=dist.rank)
        return super().train_loader(dist, **options)

    @as_config_error
    def test_loaders(
        self, dist: DistInfo, *, datasets: Datasets = None, **options: Any
    ) -> dict[str, EvalLoader]:
        loaders, settings = super().test_loaders(dist, datasets=datasets, **options), self.settings
        if datasets is None and settings.targetmap:
            path = path_below(settings.path, settings.targetmap, "DATA.TARGETMAP")
            mappings = {
                name: read_class_mapping(path, settings.num_classes, loader.classes)
                for name, loader in loaders.items()
            }
            self.target.set_class_mapping(mappings)
        return loaders

    def limit_classes(self, top: int | None = 5, threshold: float = 0.0) -> None:
        self.target.top, self.target.threshold = top, threshold


class Multilabel(ConfiguredTask):
    """Multilabel classification: any number of labels per image, built from a config."""

    kind = Labels
    target_keys = {
        "loss": "MULTILABEL.LOSS",
        "label_smoothing": "LOSS.LABEL_SMOOTHING",
        "weight_setting": "LOSS.CLASS_WEIGHTS",
    }
    unused = (
        "LOSS.LOSS", "LOSS.FOCAL", "LOSS.LOGIT_ADJUSTMENT", "DATA.TARGETMAP", "DISTILL.TEMPERATURE",
    )  # fmt: skip
    output_formats = Labels.formats
    has_teacher = True


class Regression(ConfiguredTask):
    """Regression: one or more numbers per image, built from a config."""

    kind = Numbers
    target_keys = {
        "loss": "REGRESSION.LOSS",
        "mean": "REGRESSION.MEAN",
        "std": "REGRESSION.STD",
    }
    unused = ("LOSS", "DATA.TARGETMAP", "DISTILL.TEMPERATURE")
    output_formats = Numbers.formats
    learned_keys = ("REGRESSION.MEAN", "REGRESSION.STD")
    has_teacher = True

    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        report = super().load_weights(model, path, strict=strict)
        saved, head = recorded_values(path, self.learned_keys), self.finetune["head"]
        scale = (saved.get(key) for key in self.learned_keys)
        mean, std = (select_classes(head, list(numbers or ())) for numbers in scale)
        if mean and std:
            self.target.rescale_head(model, mean, std)
        return report

    def teacher_networks(self) -> Mapping[str, BuildNetwork]:
        def build(saved: CfgNode, num_outputs: int, path: Path | None, cfg: CfgNode) -> nn.Module:
            network, own = build_image_network(saved, num_outputs, path, cfg), saved.REGRESSION
            if not len(own.MEAN) == len(own.STD) == cfg.DATA.NUM_CLASSES:
                raise ConfigError(
                    f"DISTILL.TEACHER {cfg.DISTILL.TEACHER} predicts {num_outputs} numbers, or its "
                    f"REGRESSION.MEAN and STD are not known, but DATA.NUM_CLASSES is "
                    f"{cfg.DATA.NUM_CLASSES}: use a finished run with the same numbers"
                )
            return self.target.renormalize(network, own.MEAN, own.STD)

        return {"regression": build}

    def check_outputs(self, num_outputs: int) -> None:
        for key, numbers in zip(self.learned_keys, self.target.given_scale):
            if len(numbers) not in (0, num_outputs):
                raise ConfigError(
                    f"{key} has {len(numbers)} numbers, but DATA.NUM_CLASSES is {num_outputs}: set "
                    "one number per target"
                )


# ---- mixup and transforms


@as_config_error
def build_mix(cfg: CfgNode) -> Mix | None:
    """Build the function that applies mixup or cutmix to a batch; None if AUG.MIXUP_PROB is 0."""
    aug = cfg.AUG
    if aug.MIXUP_PROB <= 0:
        warn_unused(cfg, "AUG.MIXUP_PROB is 0", MIXUP)
        return None
    mixup = dict(mixup_alpha=aug.MIXUP, prob=aug.MIXUP_PROB, mode=aug.MIXUP_MODE)
    cutmix = dict(cutmix_alpha=aug.MIXCUT, cutmix_minmax=tuple(aug.MIXCUT_MINMAX) or None)
    common = dict(label_smoothing=cfg.LOSS.LABEL_SMOOTHING, seed=cfg.SEED)
    switch = aug.MIXUP_SWITCH_PROB
    return Mix(cfg.DATA.NUM_CLASSES, **mixup, **cutmix, switch_prob=switch, **common)


@as_config_error
def build_train_transform(cfg: CfgNode, images: Mapping[str, Any]) -> Callable:
    """Build the transform that augments training images and converts them to tensors (c, S, S).

    c is INPUT.CHANNELS, and S is INPUT.IMAGE_SIZE. images: result of `transform_settings`. Logs a
    warning if keys are set that the transform ignores. The transform is timm's if
    AUG.TIMM_AUG.USE_TRANSFORM is True, and otherwise torchvision's, followed by AUG.TRANSFORM.
    """
    aug, finetune, use_timm = cfg.AUG, cfg.FINETUNE, cfg.AUG.TIMM_AUG.USE_TRANSFORM
    if cfg.INPUT.CHANNELS not in PIL_CHANNELS:
        warn_unused(cfg, f"INPUT.CHANNELS is {cfg.INPUT.CHANNELS}", RGB_ONLY[use_timm])
    if use_timm:
        ignored = () if finetune.USE_TRAIN_AUG else ("FINETUNE.FINETUNE",)
        ignored = (*RGB_ONLY[False], *ignored)
        own = {name.lower(): aug.TIMM_AUG[name] for name in (*FLIPS, *TIMM_KEYS)}
        own |= dict(use_timm=True, auto_augment=aug.TIMM_AUG.AUTO_AUGMENT or None)
    else:
        ignored = [f"AUG.TIMM_AUG.{name}" for name in TIMM_KEYS]
        own = {name.lower(): aug[name] for name in ("COLOR_JITTER", "GRAY_SCALE", "GAUSSIAN_BLUR")}
        own |= {name.lower(): aug.TIMM_AUG[name] for name in FLIPS}
        own["finetune"] = finetune.FINETUNE and not finetune.USE_TRAIN_AUG
    warn_unused(cfg, f"AUG.TIMM_AUG.USE_TRANSFORM is {use_timm}", ignored)
    if not finetune.FINETUNE:
        warn_unused(cfg, "FINETUNE.FINETUNE is False", ("FINETUNE.USE_TRAIN_AUG",))
    if aug.TRANSFORM:
        if cfg.INPUT.CHANNELS not in PIL_CHANNELS:
            raise ConfigError(
                f"AUG.TRANSFORM {aug.TRANSFORM} is for RGB images, but INPUT.CHANNELS is "
                f"{cfg.INPUT.CHANNELS}: leave AUG.TRANSFORM empty"
            )
        arguments = TRANSFORMS.entry(aug.TRANSFORM).read_settings(leaves(cfg))
        own["registered"] = build_transform(aug.TRANSFORM, cfg.INPUT.IMAGE_SIZE, arguments)
    own |= dict(scale=tuple(aug.SCALE), ratio=tuple(aug.RATIO), channels=cfg.INPUT.CHANNELS)
    return train_transform(cfg.INPUT.IMAGE_SIZE, **images, **own)


def transform_settings(cfg: CfgNode) -> dict[str, Any]:
    """Return keyword arguments for transforms: the config's mean, std, crop_pct, interpolation."""
    return dict(
        mean=list(cfg.INPUT.MEAN),
        std=list(cfg.INPUT.STD),
        crop_pct=cfg.INPUT.CROP_PCT,
        interpolation=INTERPOLATIONS[cfg.INPUT.INTERPOLATION],
    )


def card_transform(cfg: CfgNode) -> dict[str, Any]:
    """Return the settings of the input transform that weight files and exported models record."""
    values = {"value_range": list(cfg.DATA.VALUE_RANGE)} if cfg.DATA.VALUE_RANGE else {}
    return {**transform_settings(cfg), "background": list(cfg.INPUT.BACKGROUND), **values}
