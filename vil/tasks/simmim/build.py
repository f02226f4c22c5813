"""Build the task of masked image modeling from a config."""

import torch
from yacs.config import CfgNode

from vil.tasks.pretraining.task import Pretraining
from vil.tasks.simmim.model import PixelModel
from vil.tasks.simmim.target import MaskedPixels
from vil.utils.errors import ConfigError, as_config_error


class MaskedImages(Pretraining):
    """Learns to predict the pixels of masked squares of images."""

    kind = MaskedPixels
    target: MaskedPixels
    target_keys = {"seed": "SEED", "ratio": "SIMMIM.RATIO", "patch": "SIMMIM.PATCH"}
    unused = ("LOSS", "DATA.TARGETMAP", "DISTILL", "FINETUNE.HEAD")

    @as_config_error
    def __init__(self, cfg: CfgNode, device: torch.device):
        super().__init__(cfg, device)

    @as_config_error
    def build_model(self, *, load_pretrained: bool = False) -> PixelModel:
        body, stride = self.build_body(load_pretrained=load_pretrained)
        side, patch = self.settings.image_size, self.target.patch or stride
        if side % patch or side == patch:
            raise ConfigError(
                f"SIMMIM.PATCH {patch}: squares of this side do not fill images of "
                f"INPUT.IMAGE_SIZE {side}, or there is only one: use a smaller divisor of {side}"
            )
        self.target.patch = patch
        return PixelModel(body, self.settings.channels)
