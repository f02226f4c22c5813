"""Parameters and multiply-accumulates (MACs) of a model's parts, for one image."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vil.models.vision_longformer import MsViT


class CostRow(NamedTuple):
    """A part of a model and what it costs for one image."""

    part: str
    attention: str
    tokens: str
    width: int | str
    parameters: int
    macs: int


def model_cost(model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
    """The stages and the head of MsViT; one row for an external model.

    The model may be on the meta device. size: of the image, in pixels.
    """
    return msvit_cost(model, size) if isinstance(model, MsViT) else external_cost(model, size)


def msvit_cost(model: MsViT, size: tuple[int, int]) -> list[CostRow]:
    """A row per stage and one for the head, by the model's own formulas."""
    macs = model.macs(size)
    rows = []
    stages = zip(model.stages, model.specs, model.grids(size), macs)
    for number, (stage, spec, grid, count) in enumerate(stages, start=1):
        kinds = f"{len(spec.attention)} x {','.join(dict.fromkeys(spec.attention)) or '-'}"
        tokens = f"{grid[0]} x {grid[1]} + {spec.num_global}"
        rows.append(CostRow(f"stage {number}", kinds, tokens, spec.dim, num_params(stage), count))
    head = num_params(model.norm) + num_params(model.head)
    return [*rows, CostRow("head", "", "", model.num_features, head, macs[-1])]


def external_cost(model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
    """One row."""
    with sdpa_kernel(SDPBackend.MATH):
        _, macs = count_macs(model, torch.empty(1, 3, *size, device="meta"))
    return [CostRow("model", "", "", "", num_params(model), macs)]


def count_macs(module: nn.Module, *arguments: Any) -> tuple[Any, int]:
    """The output of a module on the meta device, and its MACs, half of torch's FLOPs."""
    with FlopCounterMode(display=False) as counter:
        output = module.eval()(*arguments)
    return output, counter.get_total_flops() // 2


def num_params(module: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
