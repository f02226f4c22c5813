"""Count a model's parameters and multiply-accumulates (MACs), and find its layout copies.

A layout copy changes the memory layout of a tensor, for example from NCHW to NHWC.
"""

from typing import NamedTuple

import torch
from yacs.config import CfgNode

from vil.bench.layout_copies import conversions
from vil.builders.cost import CostRow, num_params
from vil.builders.device import amp_dtype, configure_device, memory_format
from vil.builders.model import move_to_device
from vil.layers.attention import set_progress
from vil.tasks import refuse_without, task_entry, task_for, with_num_classes
from vil.utils.train_step import TrainStep


class Cost(NamedTuple):
    """Number of parameters and of multiply-accumulates (MACs) of a model.

    rows: cost of each part of the model, such as a stage or the head, for one image.
    parameters: number of parameters of the full model.
    """

    rows: list[CostRow]
    parameters: int

    @property
    def macs(self) -> int:
        """Total number of multiply-accumulates of the model for one image."""
        return sum(row.macs for row in self.rows)


def counts_cost(cfg: CfgNode) -> bool:
    """Return whether the config's task can count the cost of a model. The task of a plug-in may
    lack the method `cost`."""
    return task_entry(cfg).load().supports("cost")


def analyze_cost(cfg: CfgNode) -> Cost:
    """Count the parameters and the MACs of the config's model, for one image of INPUT.IMAGE_SIZE.
    The model is built on the meta device, so no weights are allocated."""
    cfg = with_num_classes(cfg)
    task = task_for(cfg, torch.device("cpu"))
    with torch.device("meta"):
        model = task.build_model()
    return Cost(task.cost(model, (cfg.INPUT.IMAGE_SIZE,) * 2), num_params(model))


def find_layout_copies(cfg: CfgNode, batch_size: int) -> list:
    """List the layout copies in one training step of the config's model on random images.

    A layout copy changes the memory layout of a tensor, for example from NCHW to NHWC. Returns a
    list of `vil.bench.layout_copies.Conversion`, each for one operator in one module, slowest
    first.
    """
    refuse_without(cfg, "resizes_to_image_size", "--layout supports only classifiers")
    cfg = with_num_classes(cfg)
    device = configure_device(cfg)
    task = task_for(cfg, device)
    model = move_to_device(cfg, task.build_model(), device).train()
    set_progress(model, TrainStep(cfg.SEED, 0, 0, 1, 1))
    shape = (batch_size, cfg.INPUT.CHANNELS, cfg.INPUT.IMAGE_SIZE, cfg.INPUT.IMAGE_SIZE)
    images = torch.randn(shape, device=device)
    images = images.contiguous(memory_format=memory_format(cfg))
    return conversions(model, images, amp_dtype(cfg))
