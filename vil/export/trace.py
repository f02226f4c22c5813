"""Trace models with torch.export: example images, dynamic axes, attention backend.

Shapes: B batch, c input channels, H W image size.
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

BACKEND = "gathered"  # plain operators, which support dynamic sizes
EXTERNAL_STRIDE = 32  # assumed for external models
MAX_STEPS = 1000  # sides to try


def trace_model(model: nn.Module, size: tuple[int, int], dynamic: Sequence[str]) -> ExportedProgram:
    """Trace a model in evaluation mode. Not strict: dynamo would hide which sizes are symbolic."""
    axis = torch.export.Dim.DYNAMIC
    axes = {"batch": {0: axis}, "size": {2: axis, 3: axis}}
    with use_backend(model, BACKEND), torch.no_grad(), as_export_error("a program of torch"):
        return torch.export.export(
            model,
            (_example(model, size, dynamic),),
            dynamic_shapes=(select_axes(axes, dynamic),),
            strict=False,
        )


def token_stride(model: nn.Module) -> int:
    """Image pixels per side of the last stage's tokens: smaller images leave no token."""
    if isinstance(model, MsViT):
        return math.prod(stage.embed.patch for stage in model.stages)
    return EXTERNAL_STRIDE


def least_side(model: nn.Module) -> int:
    """Smallest image side with more than one token, chunk and reduced token per row in each stage.

    torch specializes sizes of 1, so dynamic sizes are traced with larger ones.
    """
    if not isinstance(model, MsViT):
        return 2 * EXTERNAL_STRIDE
    found, patch = 0, 1
    for stage in model.stages:
        patch *= stage.embed.patch
        sides = (block.attn.min_export_side for block in stage.blocks)
        found = max(found, 2 * patch, *(patch * side for side in sides))
    return found


def _example(model: nn.Module, size: tuple[int, int], dynamic: Sequence[str]) -> Tensor:
    """Return images to trace with: two for a dynamic batch, and for a dynamic size a side that
    torch does not specialize."""
    if "size" in dynamic:
        size = tuple(_open_side(model, n) for n in size)
    return torch.zeros(2 if "batch" in dynamic else 1, in_channels(model), *size)


def _open_side(model: nn.Module, side: int) -> int:
    """Return a side near `side` at which positions and projections are resized in every stage.

    At a size that they are made for, resizing would be missing from the program.
    """
    step, least, made_for = token_stride(model), least_side(model), set(_sides(model))
    side = max(side, least)
    for change in range(MAX_STEPS):
        for near in (side - change * step, side + change * step):
            grids = model.grids((near, near)) if isinstance(model, MsViT) else []
            if near >= least and made_for.isdisjoint(rows for rows, _ in grids):
                return near
    raise AssertionError(f"no side near {side} avoids {made_for}")


def _sides(model: nn.Module) -> Iterator[int]:
    """Yield the numbers of rows and columns that parameters are made for."""
    for module in model.modules():
        yield from getattr(module, "param_grid", None) or ()


def in_channels(model: nn.Module) -> int:
    """Return c, of the first convolution."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)
    return first.in_channels if first is not None else 3


def select_axes(axes: Mapping[str, dict], dynamic: Sequence[str]) -> dict | None:
    """Merge the axes of the dynamic dimensions; None if all are fixed."""
    return {axis: dim for name in dynamic for axis, dim in axes[name].items()} or None


@contextmanager
def as_export_error(what: str) -> Iterator[None]:
    """Raise any error of a tracer as a ValueError with its first cause in one line."""
    try:
        yield
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(f"the model cannot be made {what}: {one_line(cause)}") from error


@contextmanager
def use_backend(model: nn.Module, backend: str) -> Iterator[None]:
    """Compute local attention by this backend inside the context."""
    modules = [m for m in model.modules() if isinstance(m, Attention) and m.backend]
    before = [module.backend for module in modules]
    try:
        for module in modules:
            module.backend = backend
        yield
    finally:
        for module, name in zip(modules, before):
            module.backend = name
