"""Build the task of masked image modeling from a config."""

from typing import Any

import torch
from yacs.config import CfgNode

from vil.data.loader import EvalLoader, TrainLoader
from vil.engine.distributed import DistInfo
from vil.tasks.pretraining.build import Pretraining
from vil.tasks.simmim.model import PixelModel
from vil.tasks.simmim.target import MaskedPixels
from vil.utils.errors import ConfigError, as_config_error


class MaskedImages(Pretraining):
    """Learns to predict the pixels of masked squares of images."""

    kind = MaskedPixels
    target: MaskedPixels
    target_keys = {"seed": "SEED", "ratio": "SIMMIM.RATIO", "patch": "SIMMIM.PATCH"}
    unused = ("LOSS", "DATA.TARGETMAP", "DISTILL")

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        super().__init__(cfg, device)

    def build_model(self, *, load_pretrained: bool = False) -> PixelModel:
        body = self.build_body(load_pretrained=load_pretrained)
        return PixelModel(body, self.settings.channels)

    @as_config_error
    def train_loader(self, dist: DistInfo, **options: Any) -> TrainLoader:
        self._fit_squares()
        return super().train_loader(dist, **options)

    @as_config_error
    def test_loaders(self, dist: DistInfo, **options: Any) -> dict[str, EvalLoader]:
        self._fit_squares()
        return super().test_loaders(dist, **options)

    def _fit_squares(self) -> None:
        """Set the side of the squares. Raises ConfigError if they do not fill an image."""
        side, given = self.settings.image_size, self.target.patch
        patch = given or self.stride
        if side % patch or side == patch:
            origin = "" if given else ", the network's stride,"
            raise ConfigError(
                f"SIMMIM.PATCH {given}: squares of {patch} x {patch} pixels{origin} do not fill "
                f"images of INPUT.IMAGE_SIZE {side}, or there is only one: set SIMMIM.PATCH to a "
                f"smaller divisor of {side}"
            )
        self.target.patch = patch
