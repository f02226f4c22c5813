"""Base class of the tasks: network, datasets and features, from a config."""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from vil.data.dataset import ImageDataset
from vil.data.datasets.composed import ConcatImageDataset
from vil.integrations.build import build_network
from vil.integrations.external_models import PREFIX
from vil.models.features import check_features, last_stride
from vil.pretrained.load_weights import Report
from vil.streaming import StreamResult
from vil.tasks.base import AttentionInput, ImageMeta, trains_batch_norm
from vil.tasks.cost import CostRow, model_cost
from vil.tasks.image.build import ConfiguredTask
from vil.tasks.image.task import ImageTask
from vil.tasks.pretraining.model import PretrainingModel, load_pretraining
from vil.tasks.pretraining.target import FeatureTarget
from vil.tasks.streamed_model import StreamedModel
from vil.utils.errors import ConfigError, as_config_error


class Pretraining(ConfiguredTask):
    """Trains a network without its head. Classes of the images are ignored.

    A subclass defines `build_model`, which calls `build_body`.

    stride: of the network's last map in pixels.
    """

    output_formats = FeatureTarget.formats
    accepts_any_classes = True

    @classmethod
    def supports(cls, ability: str) -> bool:
        # an exported file has the network's features, and evaluation needs the other layers too
        return ability != "load_exported" and super().supports(ability)

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device, **own: Any):
        if cfg.MODEL.ARCH != "msvit" and not cfg.MODEL.ARCH.startswith(PREFIX):
            raise ConfigError(
                f"MODEL.ARCH {cfg.MODEL.ARCH} has no grid of features: use msvit, or a model of "
                "timm (timm/NAME)"
            )
        super().__init__(cfg, device, **own)
        self.rule, self.build_network = cfg.FINETUNE.RESIZE, partial(build_network, cfg, 0)

    @cached_property
    def stride(self) -> int:
        with torch.device("meta"):
            return self._stride_of(self.build_network())

    @staticmethod
    def _stride_of(body: nn.Module) -> int:
        check_features(body, "the network of MODEL.ARCH")
        return last_stride(body)

    # ---- network

    def build_body(self, *, load_pretrained: bool) -> nn.Module:
        """Build the network without its head. Its stride divides INPUT.IMAGE_SIZE."""
        side = self.settings.image_size
        body = self.build_network(load_pretrained=load_pretrained)
        self.stride = stride = self._stride_of(body)
        if side % stride:
            near = max(side // stride, 1) * stride
            raise ConfigError(
                f"INPUT.IMAGE_SIZE {side} is not a multiple of the network's stride, {stride}: use "
                f"{near} or {near + stride}"
            )
        self.has_batch_norm, self.is_built = trains_batch_norm(body), True
        return body

    @as_config_error
    def load_weights(self, model: nn.Module, path: Path, *, strict: bool = True) -> Report:
        return load_pretraining(model, path, self.rule, strict=strict)

    def cost(self, model: PretrainingModel, size: tuple[int, int]) -> list[CostRow]:
        return model_cost(model.body, size)

    # ---- data

    def open_train_set(self) -> ImageDataset:
        transform = self.build_train_transform()
        names = self.settings.train
        sets = [self._open_part(name, "train", transform) for name in names]
        if len({(each.target_type, len(each.classes)) for each in sets}) > 1:
            for each in sets:  # what is ignored need not match
                each.classes, each.target_type = ["image"], "class"
                each.targets = np.zeros(len(each), np.int64)
        return sets[0] if len(sets) == 1 else ConcatImageDataset(sets, names)

    def open_test_set(self, name: str, split: str = "val") -> ImageDataset:
        return self._open_part(name, split, self.transform)

    def _check(self, dataset: Any, name: str, *, match: bool = True) -> None:
        super()._check(dataset, name, match=False)

    def format_target(self, target: Tensor) -> str:
        return ""

    def describe_target(self, dataset: ImageDataset, index: int) -> None:
        return None

    # ---- inference

    def compute_outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the pooled features (B, D) of the network for images (B, c, H, W)."""
        return self.compute_features(model, images)

    def attention_input(self, model: nn.Module, image: Any) -> AttentionInput:
        return super().attention_input(model, image)._replace(network=model.attention_body)

    def for_ensemble(self, tasks: Sequence[ImageTask]) -> ImageTask:
        raise ConfigError(
            "the features of several networks have different meanings and cannot be averaged: name "
            "one run"
        )

    def stream_model(self, model: nn.Module) -> StreamedModel:
        return StreamedFeatures(self, model)


class StreamedFeatures(StreamedModel):
    """Streams the pooled features of the body of a model."""

    outputs = ("pooled",)

    def __init__(self, task: Pretraining, model: nn.Module) -> None:
        super().__init__(task, model.body if isinstance(model, PretrainingModel) else model)

    def predict(self, result: StreamResult, meta: ImageMeta, *unused: Any) -> Any | None:
        features = result.pooled[None].float().cpu()
        return self.task.postprocess(features, [meta])[0] if features.isfinite().all() else None
