"""Trace models with torch.export: choose example images, dynamic axes and the attention backend.

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

EXTERNAL_STRIDE = 32  # pixels; assumed for models of other libraries
MAX_STEPS = 1000  # steps by which `_open_side` changes the side in each direction


@dataclass(frozen=True)
class ExportSpec:
    """Settings of an export: the image shapes that the file accepts, and its opset.

    size: height and width of the images.
    dynamic: which of the dimensions "batch" and "size" stay dynamic.
    opset: ONNX opset; None for torch's default.
    output: name of the outputs in an ONNX file.
    """

    size: tuple[int, int]
    dynamic: Sequence[str]
    opset: int | None = None
    output: str = "logits"

    def select_axes(self, batch: object, height: object, width: object) -> tuple:
        """Return the argument `dynamic_shapes` of torch.export.export and torch.onnx.export.

        batch, height, width: values that mark these axes as dynamic, such as names or Dim.DYNAMIC.
        Returns ({axis: value},) with the dynamic axes of the images, or (None,) if there are none.
        """
        axes = {"batch": {0: batch}, "size": {2: height, 3: width}}
        return ({axis: dim for name in self.dynamic for axis, dim in axes[name].items()} or None,)


def trace_model(model: nn.Module, spec: ExportSpec) -> ExportedProgram:
    """Trace a model with torch.export. The model must be in evaluation mode and on the CPU.

    Uses non-strict mode. In strict mode, the model's code could not check whether a size is
    symbolic. Raises ValueError if the model cannot be traced.
    """
    size, axes = spec.size, spec.select_axes(*[torch.export.Dim.DYNAMIC] * 3)
    if "size" in spec.dynamic:
        size = tuple(_open_side(model, n) for n in size)
    images = torch.zeros(2 if "batch" in spec.dynamic else 1, in_channels(model), *size)
    with use_backend(model, "auto"), torch.no_grad(), as_export_error("a torch.export program"):
        return torch.export.export(model, (images,), dynamic_shapes=axes, strict=False)


def write_program(
    model: nn.Module, spec: ExportSpec, path: Path, metadata: Mapping[str, str]
) -> None:
    """Write a model as a torch.export program.

    The program maps images (B, channels, H, W) to logits (B, classes).
    """
    files = {METADATA: json.dumps(dict(metadata))}
    torch.export.save(trace_model(model, spec), path, extra_files=files)


def find_msvit(model: nn.Module) -> MsViT | None:
    """Return the MsViT that the model is, or that is its `attention_body`; None otherwise."""
    network = getattr(model, "attention_body", model)
    return network if isinstance(network, MsViT) else None


def token_stride(model: nn.Module) -> int:
    """Return the total stride of the model in pixels; 32 for models of other libraries.

    The stride is the side of the image area that a token of the last stage covers.
    """
    network = find_msvit(model)
    return network.strides[-1] if network else EXTERNAL_STRIDE


def least_side(model: nn.Module) -> int:
    """Return the smallest image side in pixels for tracing with dynamic sizes.

    torch treats dimensions of size 1 as constant. So along each side, the token grid of every stage
    needs at least two tokens. With longformer attention it needs at least two chunks, and with
    srformer attention at least two downsampled keys.
    """
    network = find_msvit(model)
    if not network:
        return 2 * EXTERNAL_STRIDE
    return max(
        stride * max([2, *(block.attn.min_export_side for block in stage.blocks)])
        for stage, stride in zip(network.stages, network.strides)
    )


def _open_side(model: nn.Module, side: int) -> int:
    """Return an image side near `side`, in pixels, at which to trace a program with a dynamic size.

    At the returned side, every stage has to resize its position embeddings and projections, so that
    the traced program includes the resizing.
    """
    step, least, network = token_stride(model), least_side(model), find_msvit(model)
    made_for = {n for m in model.modules() for n in getattr(m, "param_grid", None) or ()}
    side = max(side // step * step, least)
    for change in range(MAX_STEPS):
        for near in (side - change * step, side + change * step):
            grids = network.grids((near, near)) if network else []
            if near >= least and made_for.isdisjoint(rows for rows, _ in grids):
                return near
    raise AssertionError(
        f"cannot trace with a dynamic image size: at every image side near {side} pixels, a stage "
        f"has a grid side in {made_for}, so it does not resize its parameters. Leave 'size' out of "
        "`dynamic`"
    )


def in_channels(model: nn.Module) -> int:
    """Return the number of input channels of a model's first convolution, or 3 if the model has no
    convolution."""
    return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)


@contextmanager
def as_export_error(what: str) -> Iterator[None]:
    """Convert any error in a `with` block to a ValueError that names the format and the reason.

    what: the export format for the message, such as "ONNX".
    """
    try:
        yield
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(f"the model cannot be exported as {what}: {one_line(cause)}") from error


@contextmanager
def use_backend(model: nn.Module, backend: str) -> Iterator[None]:
    """Set the attention backend of all local attention modules in a `with` block, and restore the
    previous backends at its end."""
    before = {m: m.backend for m in model.modules() if isinstance(m, Attention) and m.backend}
    try:
        for module in before:
            module.backend = backend
        yield
    finally:
        for module, name in before.items():
            module.backend = name
