"""Trace models with torch.export: example images, dynamic axes, attention backend.

Shapes: B batch, c input channels, H W image size, K classes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram

from vil.export.runtime import METADATA
from vil.layers.attention.base import Attention
from vil.models.vision_longformer import MsViT
from vil.utils.errors import one_line

BACKEND = "gathered"  # plain operators, which support dynamic sizes
EXTERNAL_STRIDE = 32  # assumed for external models
MAX_STEPS = 1000  # sides to try


@dataclass(frozen=True)
class ExportSpec:
    """size: height and width of images. dynamic: dimensions that stay dynamic, of `batch` and
    `size`. opset: ONNX opset, None for torch's default."""

    size: tuple[int, int]
    dynamic: Sequence[str]
    opset: int | None = None

    def select_axes(self, batch: object, height: object, width: object) -> tuple:
        """Return `dynamic_shapes` of torch's exporters with these names for dynamic axes."""
        axes = {"batch": {0: batch}, "size": {2: height, 3: width}}
        return ({axis: dim for name in self.dynamic for axis, dim in axes[name].items()} or None,)


def trace_model(model: nn.Module, spec: ExportSpec) -> ExportedProgram:
    """Trace a model in evaluation mode. Not strict: dynamo would hide which sizes are symbolic."""
    size, axes = spec.size, spec.select_axes(*[torch.export.Dim.DYNAMIC] * 3)
    if "size" in spec.dynamic:
        size = tuple(_open_side(model, n) for n in size)
    images = torch.zeros(2 if "batch" in spec.dynamic else 1, in_channels(model), *size)
    with use_backend(model, BACKEND), torch.no_grad(), as_export_error("a program of torch"):
        return torch.export.export(model, (images,), dynamic_shapes=axes, strict=False)


def write_program(
    model: nn.Module, spec: ExportSpec, path: Path, metadata: Mapping[str, str]
) -> None:
    """Write a torch.export program: images (B, c, H, W) -> logits (B, K)."""
    files = {METADATA: json.dumps(dict(metadata))}
    torch.export.save(trace_model(model, spec), path, extra_files=files)


def token_stride(model: nn.Module) -> int:
    """Image pixels per side of the last stage's tokens: smaller images leave no token."""
    return model.strides[-1] if isinstance(model, MsViT) else EXTERNAL_STRIDE


def least_side(model: nn.Module) -> int:
    """Smallest image side with more than one token, chunk and reduced token per row in each stage.

    torch specializes sizes of 1, so dynamic sizes are traced with larger ones.
    """
    if not isinstance(model, MsViT):
        return 2 * EXTERNAL_STRIDE
    return max(
        stride * max([2, *(block.attn.min_export_side for block in stage.blocks)])
        for stage, stride in zip(model.stages, model.strides)
    )


def _open_side(model: nn.Module, side: int) -> int:
    """Return a side near `side` at which positions and projections are resized in every stage.

    At a size that they are made for, resizing would be missing from the program.
    """
    step, least = token_stride(model), least_side(model)
    made_for = {n for m in model.modules() for n in getattr(m, "param_grid", None) or ()}
    side = max(side, least)
    for change in range(MAX_STEPS):
        for near in (side - change * step, side + change * step):
            grids = model.grids((near, near)) if isinstance(model, MsViT) else []
            if near >= least and made_for.isdisjoint(rows for rows, _ in grids):
                return near
    raise AssertionError(f"no side near {side} avoids {made_for}")


def in_channels(model: nn.Module) -> int:
    """Return c, of the first convolution."""
    return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)


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
    before = {m: m.backend for m in model.modules() if isinstance(m, Attention) and m.backend}
    try:
        for module in before:
            module.backend = backend
        yield
    finally:
        for module, name in before.items():
            module.backend = name
