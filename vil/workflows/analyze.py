"""Count a model's parameters and multiply-accumulates (MACs)."""

from typing import NamedTuple

import torch
from yacs.config import CfgNode

from vil.tasks import FEWEST_CLASSES, TASKS, task_for, with_num_classes
from vil.tasks.cost import CostRow, num_params
from vil.utils.errors import ConfigError


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


def analyze_cost(cfg: CfgNode) -> Cost:
    """Count the parameters and the MACs of the config's model, for one image of INPUT.IMAGE_SIZE.
    The model is built on the meta device, so no weights are allocated. Raises ConfigError if the
    task, such as that of a plug-in, does not count the cost of a model."""
    if not TASKS.entry(cfg.TASK).load().supports("cost"):
        raise ConfigError(f"TASK {cfg.TASK} does not count the cost of a model")
    cfg = with_num_classes(cfg, FEWEST_CLASSES)
    task = task_for(cfg, torch.device("cpu"))
    with torch.device("meta"):
        model = task.build_model()
    return Cost(task.cost(model, (cfg.INPUT.IMAGE_SIZE,) * 2), num_params(model))
