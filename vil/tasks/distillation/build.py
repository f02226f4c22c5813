"""Build the distillation task from a config: teacher, student, datasets."""

from typing import Any

import torch
from yacs.config import CfgNode

from vil.data.loader import EvalLoader, TrainLoader
from vil.engine.distributed import DistInfo
from vil.tasks.distillation.model import Student
from vil.tasks.distillation.target import Features
from vil.tasks.distillation.teacher import TRAIN
from vil.tasks.pretraining.build import Pretraining
from vil.tasks.teacher import build_teacher
from vil.utils.errors import as_config_error


class Distillation(Pretraining):
    """Learns the features of a teacher from images."""

    kind = Features
    target: Features
    unused = (
        "LOSS", "DATA.TARGETMAP", "DISTILL.SHARE", "DISTILL.TEMPERATURE",
    )  # fmt: skip
    has_teacher = True
    learned_keys = ("DISTILL.SIZES",)

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        super().__init__(cfg, device, teacher=build_teacher(cfg, device))
        self.teacher, self.sizes = self.target.teacher, tuple(cfg.DISTILL.SIZES)

    def build_distillation(self, cfg: CfgNode, device: torch.device) -> None:
        return None  # of outputs

    @as_config_error
    def build_model(self, *, load_pretrained: bool = False) -> Student:
        # before the body, which sets the seed of its and of the projectors' random weights
        sizes, side = self.sizes or self.teacher.sizes, self.settings.image_size
        body = self.build_body(load_pretrained=load_pretrained)
        self.target.grid = (side // self.stride,) * 2
        self.teacher.fit_grid(self.target.grid, side)
        self.sizes = self.teacher.required_sizes = sizes
        return Student(body, *sizes)

    @as_config_error
    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        loader = super().train_loader(dist, **options)
        self.learned_settings = {"DISTILL.SIZES": list(self.sizes)} if self.sizes else {}
        self.teacher.open({TRAIN: loader.samples.dataset})
        if self.is_built:  # a missing file is found before a training starts
            _ = self.teacher.network
        return loader

    def test_loaders(self, dist: DistInfo, **options: Any) -> dict[str, EvalLoader]:
        loaders = super().test_loaders(dist, **options)
        self.teacher.open({name: loader.dataset for name, loader in loaders.items()})
        return loaders
