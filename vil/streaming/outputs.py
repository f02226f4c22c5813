"""Outputs of a streamed forward pass: vectors, and maps that are written row by row.

Shapes: X Y grid of a stage, d channels, K classes, n rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vil.models.vision_longformer import MsViT
from vil.streaming.checks import stage_of
from vil.streaming.map_files import release_pages
from vil.streaming.plan import StreamPlan
from vil.streaming.rows import Writer
from vil.utils.errors import ConfigError

FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class StreamResult:
    """The result of `vil.stream`.

    outputs: {name of an output: tensor without batch dimension}. The map of a stage, for example,
    is (channels, rows, columns). If the caller passed an array for an output in `into`, the value
    is this array. plan: the plan that was run.
    """

    outputs: Mapping[str, Any]
    plan: StreamPlan

    def __getitem__(self, name: str) -> Any:
        return self.outputs[name]

    @property
    def logits(self) -> Any:
        """The logits: (classes,) if the model has pooling, else (classes, rows, columns)."""
        return self.outputs["logits"]

    @property
    def pooled(self) -> Any:
        """The features before the head: (channels,) if the model has pooling, else (channels, rows,
        columns)."""
        return self.outputs["pooled"]


def map_shapes(
    model: MsViT, outputs: tuple[str, ...], size: tuple[int, int], *, pad: bool = False
) -> dict[str, tuple[int, int, int]]:
    """Return {name: shape (channels, X, Y)} for those outputs that are maps. size: (H, W) of the
    image in pixels. pad: see `vil.streaming.prepare`."""
    grids, shapes = model.grids(size, pad=pad), {}
    for name in outputs:
        index = stage_of(name)
        if index is not None or not model.global_pool:
            shapes[name] = (output_width(model, name), *grids[-1 if index is None else index])
    return shapes


def output_width(model: MsViT, name: str) -> int:
    """Return the number of channels of an output."""
    index = stage_of(name)
    if index is not None:
        return model.channels[index]
    return model.num_classes if name == "logits" and model.num_classes else model.num_features


def check_into(
    into: Mapping[str, Any] | None,
    outputs: tuple[str, ...],
    shapes: Mapping[str, tuple[int, int, int]],
) -> dict[str, Any]:
    """Check the caller's arrays for outputs, and return them as a dict {output: array}.

    into: the arrays. outputs: the requested outputs. shapes: the shapes of the maps, from
    `map_shapes`. Raises ConfigError if an array has the wrong shape or dtype or is read-only, or
    if its output was not requested or is not a map.
    """
    into = dict(into or {})
    for name, array in into.items():
        if name not in outputs:
            raise ConfigError(
                f"`into` has the key {name!r}, which is not an output: "
                f"the outputs are {', '.join(outputs)}"
            )
        if name not in shapes:
            raise ConfigError(
                f"`into` has the key {name!r}, but this output is a vector, and `into` accepts "
                "only maps: remove the key"
            )
        shape = tuple(getattr(array, "shape", ()))
        if shape != shapes[name]:
            raise ConfigError(
                f"`into[{name!r}]` has the shape {shape}, but the map needs {shapes[name]}"
            )
        if str(array.dtype).removeprefix("torch.") not in FLOATS:
            raise ConfigError(
                f"into[{name!r}] has the type {array.dtype}, expected one of {', '.join(FLOATS)}"
            )
        is_writeable = getattr(getattr(array, "flags", None), "writeable", True)  # of NumPy
        if not is_writeable or getattr(array, "read_only", False):  # of zarr
            raise ConfigError(f"into[{name!r}] is read-only: give an array that can be written to")
    return into


def writer_into(target: Any) -> Writer:
    """Return a function that writes rows (n, Y, d) to `target`, a map (d, X, Y)."""

    def write(first: int, rows: Tensor) -> None:
        rows = rows.permute(2, 0, 1)
        if not isinstance(target, Tensor):
            rows = rows.float() if rows.dtype == torch.bfloat16 else rows
            rows = rows.cpu().numpy()
        target[:, first : first + rows.shape[1]] = rows
        release_pages(target)

    return write
