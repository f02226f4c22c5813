"""The settings with which a rank runs a model, read from a config."""

from typing import NamedTuple

import torch
from yacs.config import CfgNode

from vil.engine.build import MEMORY_FORMATS, amp_dtype


class Execution(NamedTuple):
    """How one rank runs a model.

    batch_size: images in a batch of this rank. image_size: side of an image in pixels. amp_dtype:
    the autocast dtype; None without autocast. memory_format: of the weights and the images.
    compile_mode: mode of `torch.compile`; None if the model is not compiled.
    """

    device: torch.device
    batch_size: int
    image_size: int
    amp_dtype: torch.dtype | None
    memory_format: torch.memory_format
    compile_mode: str | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of attention and of linear layers."""
        return self.amp_dtype or torch.float32


def execution_of(cfg: CfgNode, device: torch.device, world: int = 1) -> Execution:
    """Read the settings of a config. world: number of processes, among which a batch of
    DATALOADER.BSZ images is divided."""
    return Execution(
        device,
        max(1, cfg.DATALOADER.BSZ // world),
        cfg.INPUT.IMAGE_SIZE,
        amp_dtype(cfg.AMP.DTYPE, enabled=cfg.AMP.ENABLED),
        MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT],
        cfg.MODEL.COMPILE_MODE if cfg.MODEL.COMPILE else None,
    )
