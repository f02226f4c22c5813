"""Count the parameters and the multiply-accumulates (MACs) per image of each stage of a model."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vil.export.trace import in_channels
from vil.models.vision_longformer import MsViT


class CostRow(NamedTuple):
    """Cost of a stage, of the head, or of a full model. Fields that do not apply are empty.

    attention: number of blocks and their attention, such as "2 x longformer". tokens: local +
    global tokens, such as "14 x 14 + 1". width: channels. macs: multiply-accumulates for one image.
    """

    part: str
    attention: str
    tokens: str
    width: int | str
    parameters: int
    macs: int


def model_cost(model: nn.Module, size: tuple[int, int]) -> list[CostRow]:
    """Count the parameters and MACs of an MsViT. Returns one row per stage, and one for the head.

    Any other model must be on the meta device, and gets a single row. size: (height, width) of the
    image in pixels.
    """
    return msvit_cost(model, size) if isinstance(model, MsViT) else external_cost(model, size)


def msvit_cost(model: MsViT, size: tuple[int, int]) -> list[CostRow]:
    """Count the parameters and MACs of each stage and of the head of an MsViT. Returns one row per
    stage, followed by one for the head. The MACs are those of `MsViT.macs`.

    size: (height, width) of the image in pixels.
    """
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
    """Count the parameters and MACs of a model that is not an MsViT. Returns a single row.

    The model must be on the meta device. size: (height, width) of the image in pixels.
    """
    with sdpa_kernel(SDPBackend.MATH):
        _, macs = count_macs(model, torch.empty(1, in_channels(model), *size, device="meta"))
    return [CostRow("model", "", "", "", num_params(model), macs)]


def count_macs(module: nn.Module, *arguments: Any) -> tuple[Any, int]:
    """Set a module to eval mode, call it with `arguments`, and return (output, MACs). The MACs are
    half of the FLOPs that torch's FlopCounterMode counts."""
    with FlopCounterMode(display=False) as counter:
        output = module.eval()(*arguments)
    return output, counter.get_total_flops() // 2


def num_params(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
