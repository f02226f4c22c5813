"""Base classes of tasks with one target per image: a class, a set of labels, or numbers.

Shapes: B images of a batch, c channels, N images of a test set, K outputs of the model.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image
from yacs.config import CfgNode

from vil.config.access import warn_unused
from vil.data import build as data
from vil.data import build_dataset, is_numbered, own_arguments
from vil.data.bands import PIL_CHANNELS
from vil.data.batch import Batch
from vil.data.build import derived_splits, split_indices
from vil.data.classes import add_learned_classes, match_classes
from vil.data.dataset import ImageDataset
from vil.data.datasets.concat import ConcatImageDataset
from vil.data.datasets.subset import Subset
from vil.data.loader import TrainLoader
from vil.data.pixels import loader_transform
from vil.data.transforms import eval_transform, train_transform
from vil.data.views import View, make_views
from vil.engine.distributed import DistInfo, all_reduce_max, gather_objects, unwrap
from vil.engine.evaluation import autocast, evaluating, iter_in_step
from vil.engine.loop import Loss
from vil.integrations.build import build_network
from vil.integrations.optimize import OptimizedModel
from vil.models.features import pooled_features
from vil.pretrained.load_weights import Report, load_weights
from vil.tasks.base import Task
from vil.tasks.config_task import ConfigTask
from vil.tasks.cost import model_cost
from vil.utils.errors import ConfigError, DataError, as_config_error
from vil.utils.image_text import draw_text, enlarge, font_for
from vil.utils.memory import copy_to_device

INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
# {whether timm's transform is used: keys of augmentations that are applied to RGB images only}
RGB_ONLY = {
    True: ("AUG.TIMM_AUG.COLOR_JITTER", "AUG.TIMM_AUG.AUTO_AUGMENT"),
    False: ("AUG.COLOR_JITTER", "AUG.GRAY_SCALE", "AUG.GAUSSIAN_BLUR"),
}
# Keys in AUG.TIMM_AUG that set arguments of `train_transform`.
TIMM_KEYS = ("HFLIP", "VFLIP", "COLOR_JITTER", "RE_PROB", "RE_MODE", "RE_COUNT", "AUTO_AUGMENT")
SYNTHETIC = "fake"  # dataset for `synthetic`
MAX_EVAL_BATCH = 64  # images
LABEL_COLOR = (0, 0, 0)  # background of text in visualizations
# Largest number and smallest weight of classes that `format_target` names.
MAX_NAMED, MIN_NAMED = 4, 0.1
# {`ImageDataset.target_type`: description of the targets in messages}
TARGETS = {"class": "one class", "labels": "a set of labels", "numbers": "numbers"}


class Outputs(NamedTuple):
    """The model's outputs (`values`) and the targets for N images of a test set, in the order of
    the set. `indices` has the index of each image in the set."""

    indices: np.ndarray  # (N,) int64: index of the image in the test set
    targets: np.ndarray  # (N,) or (N, K), see `ImageDataset`
    values: np.ndarray  # (N, K) float32


class ImageTask(Task):
    """Base class of tasks with one target per image. It takes explicit arguments, not a config.

    Args:
        transform: evaluation transform, from a PIL image to a tensor (c, H, W).
        image_weights: weight of each training image in the loss, 1-dim; None: all weights are 1.
        crop_transform: evaluation transform for the square crops of test-time augmentation. It
            resizes a crop and must not crop further. None: use `transform`.
    """

    def __init__(
        self,
        *,
        transform: Callable[[Image.Image], Tensor] | None = None,
        image_weights: Tensor | None = None,
        crop_transform: Callable[[Image.Image], Tensor] | None = None,
        **common: Any,
    ):
        super().__init__(**common)
        self.transform, self.crop_transform = transform, crop_transform or transform
        self.image_weights = self.to_device(image_weights)

    def to_device(self, constant: Tensor | None) -> Tensor | None:
        """Copy a constant of the loss to the device, once, because a copy makes the host wait."""
        return None if constant is None else constant.to(self.device)

    def weights_of(self, batch: Batch) -> Tensor:
        """Return the weights (B,) of a batch's images, on the device. `image_weights` is set."""
        return self.image_weights[copy_to_device(batch.indices, self.device)]

    def preprocess(self, image: Image.Image) -> Tensor:
        """Apply the evaluation transform to an image and return a tensor (c, H, W)."""
        return self.transform(image)

    def preprocess_views(self, image: Image.Image, views: Sequence[View]) -> Tensor:
        """Apply test-time augmentation to an image, and return its V views (V, c, H, W).

        views: the mirror images and crops to create, see `vil.data.views`.
        """
        return make_views(image, tuple(views), self.transform, self.crop_transform)

    def compute_outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the model's outputs (B, K) float32 for images (B, c, H, W) on the device."""
        with autocast(self.device, self.amp_dtype):
            return model(images).float()

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Return the model's outputs (B, K) float32, on the CPU, for B tensors (c, H, W)."""
        placement = dict(device=self.device, memory_format=self.memory_format)
        images = torch.stack(list(inputs)).to(**placement, non_blocking=True)
        return self.compute_outputs(model, images).cpu()

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the mean of several outputs (B, K) of `run`, computed in float64."""
        return torch.stack([output.double() for output in outputs]).mean(dim=0).float()

    def embed(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Return the pooled features (B, D) float32, on the CPU, of B tensors (c, H, W)."""
        placement = dict(device=self.device, memory_format=self.memory_format)
        images = torch.stack(list(inputs)).to(**placement, non_blocking=True)
        if isinstance(model, OptimizedModel):
            return model.call(partial(pooled_features, model.model), images).cpu()
        with autocast(self.device, self.amp_dtype):
            return pooled_features(model, images).float().cpu()

    def add_target(self, prediction: Any, target: str) -> Any:
        """Return a copy of a prediction with its field `target` set."""
        return prediction._replace(target=target)

    def collect_outputs(
        self, model: nn.Module, name: str, between: Callable[[], None] = lambda: None
    ) -> Outputs | None:
        """Run a model in eval mode on the test set `name`, and return its outputs.

        Rank 0 returns the outputs of all ranks, the others None. between: function that is called
        before each batch. Raises DataError, on all ranks, if no image can be read.
        """
        rows = []
        for batch in iter_in_step(self.test_sets[name], between):
            values = self.compute_outputs(model, batch.to(self.device, self.memory_format).images)
            rows.append([batch.indices.numpy(), batch.targets.numpy(), values.cpu().numpy()])
        gathered = gather_batches(rows, name)
        if not gathered:
            return None
        outputs = Outputs(*map(np.concatenate, zip(*gathered)))
        order = np.argsort(outputs.indices)
        return Outputs(*(array[order] for array in outputs))

    def first_outputs(self, model: nn.Module) -> tuple[str, Outputs | None]:
        """Return the name of the first test set, and the result of `collect_outputs` for it."""
        name = next(iter(self.test_sets))
        with evaluating(unwrap(model)) as plain:
            return name, self.collect_outputs(plain, name)

    def average_losses(self, losses: Tensor, batch: Batch, metrics: Mapping[str, Tensor]) -> Loss:
        """Return the mean of the losses (B,) of a batch's images, weighted by `image_weights`.

        If `image_weights` is None, all weights are 1. metrics: metrics for the training log, which
        are stored in the returned `Loss`.
        """
        if self.image_weights is None:
            return Loss(losses.mean(), metrics=metrics)
        weights = self.weights_of(batch)
        return Loss((weights * losses).sum(), weights.sum(), metrics)


def gather_batches(batches: list, name: str) -> list:
    """Return the evaluated batches of all ranks on rank 0, and [] on the other ranks. Raises
    DataError, on all ranks, if there are none. name: name of the test set."""
    if not all_reduce_max(len(batches)):
        raise DataError(
            f"cannot evaluate, because the test set {name} has no readable image: check its files "
            "with vil data check"
        )
    return list(itertools.chain.from_iterable(gather_objects(batches)))


class ConfigImageTask(ConfigTask, ImageTask):
    """Base class of tasks with one target per image that are built from a config.

    target_type: type of the targets, "class", "labels" or "numbers", see `ImageDataset`.
    """

    target_type = "class"
    has_splits = True
    max_eval_batch = MAX_EVAL_BATCH
    own_arguments = staticmethod(own_arguments)
    cost = staticmethod(model_cost)

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device, **settings: Any):
        transforms = dict(transform=build_eval_transform(cfg))
        transforms["crop_transform"] = build_eval_transform(cfg, crop_pct=1.0)
        super().__init__(cfg, device, **transforms, **settings)
        self._parts: dict[str, dict[str, np.ndarray]] = {}  # {dataset: {split: indices}}

    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        loader = super().train_loader(dist, **options)
        dataset = loader.samples.dataset
        weights = dataset.weights
        self.image_weights = None if weights is None else self.to_device(torch.tensor(weights))
        self.read_targets(dataset)
        return loader

    def read_targets(self, dataset: ImageDataset) -> None:
        """Compute and store the settings that depend on the training set, such as class weights.

        dataset: the training set.
        """

    def build_model(self, *, load_pretrained: bool = False) -> nn.Module:
        return build_network(self.cfg, self.cfg.DATA.NUM_CLASSES, load_pretrained=load_pretrained)

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        # strict is ignored: weights must be complete, except for a head replaced by FINETUNE.HEAD
        finetune = self.cfg.FINETUNE
        return load_weights(model, path, head=finetune.HEAD, rule=finetune.RESIZE)

    def synthetic(self, num_samples: int, folder: Path, split: str = "train") -> ImageDataset:
        cfg = self.cfg
        transform = build_train_transform(cfg) if split == "train" else self.transform
        transform = loader_transform(transform)
        own = dict(n=num_samples, size=cfg.INPUT.IMAGE_SIZE, num_classes=cfg.DATA.NUM_CLASSES)
        own |= dict(target_type=self.target_type, channels=cfg.INPUT.CHANNELS)
        return build_dataset(SYNTHETIC, folder, split, transform, **own)

    def count_classes(self, dataset: ImageDataset) -> dict[str, int]:
        return self.summarize_targets(dataset).counts

    def draw_batch(self, batch: Batch) -> list[tuple[Image.Image, str]]:
        mean, std = (torch.tensor(self.cfg.INPUT[key])[:, None, None] for key in ("MEAN", "STD"))
        images = batch.to("cpu").images.float() * std + mean  # (B, C, H, W)
        return [
            (to_pil_image(image[:3].clamp(0, 1)), self.format_target(target))
            for image, target in zip(images, batch.targets)
        ]

    def format_target(self, target: Tensor) -> str:
        """Convert the target of one image in a batch to text.

        For a class, the text is its name. For regression targets, it is their names and values. For
        labels or a soft target, both (K,), it is the classes with the largest values.
        """
        if target.ndim == 0:
            return self.class_names[int(target)]
        pairs = zip(target.tolist(), self.class_names)
        if self.target_type == "numbers":
            return ", ".join(f"{name} {value:.3g}" for value, name in pairs)
        largest = sorted(pairs, key=lambda pair: -pair[0])[:MAX_NAMED]
        return ", ".join(f"{name} {value:.2g}" for value, name in largest if value >= MIN_NAMED)

    def open_train_set(self) -> ImageDataset:
        names, transform = self.cfg.DATA.TRAIN, build_train_transform(self.cfg)
        sets = [self._open_part(name, "train", transform) for name in names]
        for name, other in zip(names[1:], sets[1:]):
            by_position = self.cfg.DATA.CLASSES == "by_position"
            match_classes(other, sets[0].classes, name, by_position=by_position)
        dataset = sets[0] if len(sets) == 1 else ConcatImageDataset(sets, names)
        self.check_num_classes(dataset, ", ".join(names))
        if dataset.weights is not None and not dataset.weights.any():
            raise DataError(f"DATA.TRAIN {', '.join(names)}: all sample weights are 0")
        return dataset

    def open_test_set(self, name: str, split: str = "val") -> ImageDataset:
        dataset = self._open_part(name, split, self.transform)
        if not self.cfg.DATA.TARGETMAP:
            if self._is_for_evaluation(name) and self.cfg.DATA.CLASSES != "by_position":
                add_learned_classes(dataset, self.class_names, name)
            self.check_num_classes(dataset, name)
        return dataset

    def _is_for_evaluation(self, name: str) -> bool:
        """Return whether a dataset takes the argument `all_rows` and is not in DATA.TRAIN.

        For such a dataset, `all_rows` is True by default: without splits, all images are used.
        """
        return "all_rows" in self.own_arguments(name) and name not in self.cfg.DATA.TRAIN

    def _open_part(self, name: str, split: str, transform: Callable) -> ImageDataset:
        """Open the split "train", "val" or "test" of the dataset `name`.

        The config may take this split from the dataset's training split, for example by
        DATA.VAL_FRACTION. The result is then a part of the training split. transform: function that
        is applied to each image.
        """
        if split not in derived_splits(self.cfg, name):
            return self._open(name, split, transform)
        dataset = self._open(name, "train", transform)
        if name not in self._parts:
            self._parts[name] = split_indices(self.cfg, name, dataset)
        return Subset(dataset, self._parts[name][split], split)

    def _open(self, name: str, split: str, transform: Callable) -> ImageDataset:
        cfg, taken = self.cfg, self.own_arguments(name)
        with data.dataset_arguments(cfg, name, taken) as own:
            is_mapped = split != "train" and cfg.DATA.TARGETMAP
            is_free = is_mapped or self.accepts_any_classes or cfg.DATA.NUM_CLASSES == "auto"
            if is_numbered(name) and not is_free:
                own.setdefault("num_classes", cfg.DATA.NUM_CLASSES)
            if "target_type" in taken:
                own["target_type"] = self.target_type
            if self._is_for_evaluation(name):
                own.setdefault("all_rows", True)
            if "channels" in taken:
                own["channels"] = cfg.INPUT.CHANNELS
            elif cfg.INPUT.CHANNELS not in PIL_CHANNELS:
                raise ConfigError(
                    f"INPUT.CHANNELS is {cfg.INPUT.CHANNELS}, but {name} has RGB images only: set "
                    "INPUT.CHANNELS to 1 or 3"
                )
            loaded = loader_transform(transform)
            dataset = build_dataset(name, cfg.DATA.PATH, split, loaded, **own)
        if dataset.target_type != self.target_type:
            raise DataError(
                f"{name} has {TARGETS[dataset.target_type]} per image, but TASK {cfg.TASK} needs "
                f"{TARGETS[self.target_type]} per image: use another dataset or TASK"
            )
        dataset.value_range, dataset.channels = cfg.DATA.VALUE_RANGE, cfg.INPUT.CHANNELS
        return dataset


def draw_lines(image: Image.Image, lines: Sequence[str]) -> Image.Image:
    """Return a copy of an image, enlarged if it is small, with lines of text on it."""
    canvas, _ = enlarge(image)
    pen, font, y = ImageDraw.Draw(canvas), font_for(canvas), 0
    for line in lines:
        y += draw_text(pen, 0, y, line, LABEL_COLOR, font)
    return canvas


def count_outputs(cfg: CfgNode) -> int:
    """Return DATA.NUM_CLASSES, or 1 as a placeholder if it is "auto".

    With "auto", the task is used only to open datasets, not to build a model.
    """
    return 1 if cfg.DATA.NUM_CLASSES == "auto" else cfg.DATA.NUM_CLASSES


def refuse_mixing(cfg: CfgNode) -> None:
    """Raise ConfigError if the config enables mixup or cutmix, which the task does not support."""
    if cfg.AUG.MIXUP_PROB > 0:
        raise ConfigError(
            f"TASK {cfg.TASK} does not support mixup and cutmix: set AUG.MIXUP_PROB to 0"
        )


@as_config_error
def build_train_transform(cfg: CfgNode) -> Callable:
    """Build the transform that augments training images and converts them to tensors (c, S, S).

    c is INPUT.CHANNELS, and S is INPUT.IMAGE_SIZE.
    """
    aug = cfg.AUG
    if cfg.INPUT.CHANNELS not in PIL_CHANNELS:
        why = f"INPUT.CHANNELS is {cfg.INPUT.CHANNELS}"
        warn_unused(cfg, why, RGB_ONLY[aug.TIMM_AUG.USE_TRANSFORM])
    warn_unused_augmentation(cfg)
    if aug.TIMM_AUG.USE_TRANSFORM:
        own = {name.lower(): aug.TIMM_AUG[name] for name in TIMM_KEYS}
        own |= dict(use_timm=True, auto_augment=aug.TIMM_AUG.AUTO_AUGMENT or None)
    else:
        own = {name.lower(): aug[name] for name in ("COLOR_JITTER", "GRAY_SCALE", "GAUSSIAN_BLUR")}
        own["finetune"] = cfg.FINETUNE.FINETUNE and not cfg.FINETUNE.USE_TRAIN_AUG
    own |= dict(scale=tuple(aug.SCALE), ratio=tuple(aug.RATIO), channels=cfg.INPUT.CHANNELS)
    return train_transform(cfg.INPUT.IMAGE_SIZE, **transform_settings(cfg), **own)


def warn_unused_augmentation(cfg: CfgNode) -> None:
    """Log a warning if augmentation keys are set that the config's training transform ignores.

    The transform is timm's if AUG.TIMM_AUG.USE_TRANSFORM is True, and otherwise torchvision's.
    """
    aug, finetune = cfg.AUG, cfg.FINETUNE
    if aug.TIMM_AUG.USE_TRANSFORM:
        ignored = () if finetune.USE_TRAIN_AUG else ("FINETUNE.FINETUNE",)
        warn_unused(cfg, "AUG.TIMM_AUG.USE_TRANSFORM is True", (*RGB_ONLY[False], *ignored))
    else:
        names = [f"AUG.TIMM_AUG.{name}" for name in TIMM_KEYS]
        warn_unused(cfg, "AUG.TIMM_AUG.USE_TRANSFORM is False", names)
    if not finetune.FINETUNE:
        warn_unused(cfg, "FINETUNE.FINETUNE is False", ("FINETUNE.USE_TRAIN_AUG",))


@as_config_error
def build_eval_transform(cfg: CfgNode, **changes: Any) -> Callable[[Any], Tensor]:
    """Build the transform that converts images to tensors (c, S, S) for evaluation.

    c is INPUT.CHANNELS, and S is INPUT.IMAGE_SIZE. changes: arguments of `eval_transform` to use
    instead of the config's values.
    """
    settings = dict(channels=cfg.INPUT.CHANNELS, **transform_settings(cfg))
    return eval_transform(cfg.INPUT.IMAGE_SIZE, **{**settings, **changes})


def describe_target(dataset: ImageDataset, index: int) -> str:
    """Return the target of the image `index` as text.

    The text is the name of the class, the names of the labels separated by "|", or the numbers
    separated by spaces.
    """
    target = dataset.targets[index]
    if dataset.target_type == "class":
        return dataset.classes[int(target)]
    if dataset.target_type == "labels":
        return "|".join(name for name, value in zip(dataset.classes, target) if value)
    return " ".join(f"{value:.9g}" for value in target)


def transform_settings(cfg: CfgNode) -> dict[str, Any]:
    """Return keyword arguments for transforms: the config's mean, std, crop_pct, interpolation."""
    return dict(
        mean=list(cfg.INPUT.MEAN),
        std=list(cfg.INPUT.STD),
        crop_pct=cfg.INPUT.CROP_PCT,
        interpolation=INTERPOLATIONS[cfg.INPUT.INTERPOLATION],
    )
