"""A model as a program of torch.export: with what images it is traced, and by which backend.

Letters: B images, c channels, H W their size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vil.layers.attention.base import Attention
from vil.models.vision_longformer import MsViT
from vil.utils.errors import one_line

BACKEND = "gathered"  # plain operators, with open sizes too
FOREIGN_STRIDE = 32  # of models that are not ours, where nothing tells it
MANY = 1000  # sides to look among


def traced(model: nn.Module, size: tuple[int, int], dynamic: Sequence[str]) -> ExportedProgram:
    """The program that a model in evaluation is. Not strict: dynamo would hide from our code which
    sizes are open."""
    axis = torch.export.Dim.DYNAMIC
    axes = {"batch": {0: axis}, "size": {2: axis, 3: axis}}
    with backends(model, BACKEND), torch.no_grad(), as_export_error("a program of torch"):
        return torch.export.export(
            model,
            (_example(model, size, dynamic),),
            dynamic_shapes=(axes_of(axes, dynamic),),
            strict=False,
        )


def stride(model: nn.Module) -> int:
    """Pixels of a side of the last stage's tokens: smaller images leave none."""
    if isinstance(model, MsViT):
        return math.prod(stage.embed.patch for stage in model.stages)
    return FOREIGN_STRIDE


def least_side(model: nn.Module) -> int:
    """Pixels from which on no stage has but one token, one chunk of local attention or one reduced
    token in a row: ones are a case of their own for torch, so it traces open sizes with more."""
    if not isinstance(model, MsViT):
        return 2 * FOREIGN_STRIDE
    found, patch = 0, 1
    for stage in model.stages:
        patch *= stage.embed.patch
        sides = (block.attn.min_export_side for block in stage.blocks)
        found = max(found, 2 * patch, *(patch * side for side in sides))
    return found


def _example(model: nn.Module, size: tuple[int, int], dynamic: Sequence[str]) -> Tensor:
    """Images to trace with: more than one, where the number is open, and of no size that the
    program could be taken to be for alone, where that is."""
    if "size" in dynamic:
        size = tuple(_open_side(model, n) for n in size)
    return torch.zeros(2 if "batch" in dynamic else 1, channels(model), *size)


def _open_side(model: nn.Module, side: int) -> int:
    """The side next to `side` that is large enough and gives no stage as many tokens as positions
    and projections are made for: nothing would be resized, in the program neither."""
    step, least, made_for = stride(model), least_side(model), set(_sides(model))
    side = max(side, least)
    for change in range(MANY):
        for near in (side - change * step, side + change * step):
            grids = model.grids((near, near)) if isinstance(model, MsViT) else []
            if near >= least and made_for.isdisjoint(rows for rows, _ in grids):
                return near
    raise AssertionError(f"no side near {side} avoids {made_for}")


def _sides(model: nn.Module) -> Iterator[int]:
    """Tokens of a row, and of a column, that parameters are made for."""
    for module in model.modules():
        yield from getattr(module, "param_grid", None) or ()


def channels(model: nn.Module) -> int:
    """c, of the first convolution."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)
    return first.in_channels if first is not None else 3


def axes_of(named: Mapping[str, dict], dynamic: Sequence[str]) -> dict | None:
    """{axis: how torch is to leave it open}; None if all are fixed."""
    return {axis: how for name in dynamic for axis, how in named[name].items()} or None


@contextmanager
def as_export_error(what: str) -> Iterator[None]:
    """Whatever stops a tracer is a ValueError of one line that tells the first cause."""
    try:
        yield
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(f"the model cannot be made {what}: {one_line(cause)}") from error


@contextmanager
def backends(model: nn.Module, backend: str) -> Iterator[None]:
    """Inside, local attention is computed by this backend."""
    modules = [m for m in model.modules() if isinstance(m, Attention) and m.backend]
    before = [module.backend for module in modules]
    try:
        for module in modules:
            module.backend = backend
        yield
    finally:
        for module, name in zip(modules, before):
            module.backend = name
