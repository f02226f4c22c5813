"""Tasks and weights of a config on the CPU, as the workflows make them."""

import torch

from vil.tasks import task_for
from vil.tasks.base import Task
from vil.tasks.weight_files import find_weights

CPU = torch.device("cpu")


def task_of(cfg) -> Task:
    """The task of a config."""
    return task_for(cfg, CPU)


def load_model_path(model, cfg, *, strict=False) -> str:
    """Load MODEL.MODEL_PATH; the report as text."""
    path = find_weights(cfg.MODEL.MODEL_PATH, cfg.DATA.DATA_DIR)
    return str(task_of(cfg).load_weights(model, path, strict=strict))
