"""Outputs and gradients of the 2021 reference, from tests/golden."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from vil.layers.attention import set_progress
from vil.utils.train_step import TrainStep

GOLDEN = Path(__file__).parents[1] / "golden"


def read(name: str) -> tuple[dict, dict, dict, dict]:
    """The arguments, tensors, parameters and gradients of a golden file."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        meta = json.loads(file.metadata()["meta"])
    parts = [
        {
            key.removeprefix(prefix): value
            for key, value in tensors.items()
            if key.startswith(prefix)
        }
        for prefix in ("param.", "grad.")
    ]
    return meta, tensors, *parts


def step_with_mode(module: torch.nn.Module, mode: int) -> None:
    """Random shift draws its neighbour from the step: go to a step at which it draws this one."""
    for step in range(200):
        set_progress(module, TrainStep(step=step))
        if module.current_mode() == mode:
            return
    raise AssertionError(f"mode {mode} was never drawn")
