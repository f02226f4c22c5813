"""Linear layers for CPU inference, whose weights are in the memory layout of a matmul.

Shapes: ... leading dimensions, I input and O output features.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vil.layers.linear import has_hooks
from vil.ops.linear import linear, pack_weight
from vil.ops.linear_case import compute_dtype
from vil.ops.native import library

# {activation: oneDNN's (activation, algorithm)}
ACTIVATIONS = {"": ("none", ""), "gelu": ("gelu", "none"), "relu": ("relu", "")}


class PackedLinear(nn.Module):
    """A linear layer for inference, optionally followed by an activation. It has no gradients.

    weight (O, I), bias (O,) or None: float32 or bfloat16 tensors, which are copied. native: use the
    layout of vil's C++ code, not that of oneDNN. activation: "gelu" (exact), "relu", or "" for
    none; only with oneDNN, which applies it while the outputs are in the CPU cache.
    The weights are not in the state dict. Save the state dict of the original model instead.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: str = "", *, native: bool = False
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.activation, self.native, self.dtype = activation, native, weight.dtype
        self.packed = self._pack(weight.detach())
        self.bias = None if bias is None else bias.detach().clone()

    def _pack(self, weight: Tensor) -> Tensor:
        if self.native:
            return pack_weight(weight, half=self.dtype == torch.bfloat16)
        return torch.ops.mkldnn._reorder_linear_weight(weight)

    @property
    def weight(self) -> Tensor:
        """A copy of the weights (O, I)."""
        if not self.native:
            return self.packed.to_dense(self.dtype)
        rows = torch.eye(self.in_features, dtype=self.dtype)  # products with 0 and 1 are exact
        return linear(rows, self.packed, packed=True).T.contiguous()

    def __getstate__(self) -> dict[str, Any]:  # another machine may need another layout
        return {**super().__getstate__(), "packed": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.native = self.native and library.is_ready(self.dtype)
        self.packed = self._pack(state["packed"])

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., I) to (..., O)."""
        if self.native:
            if compute_dtype(x) != self.dtype:
                text = f"the weights are packed for {self.dtype}, not for {compute_dtype(x)}"
                raise RuntimeError(f"{text}: call the optimized model itself, outside of autocast")
            return linear(x, self.packed, self.bias, packed=True)
        activation, algorithm = ACTIVATIONS[self.activation]
        arguments = (self.bias, activation, [], algorithm)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, *arguments)

    def extra_repr(self) -> str:
        layout = "native" if self.native else f"oneDNN, activation={self.activation!r}"
        return f"{self.in_features}, {self.out_features}, {layout}"


def is_packed(layer: nn.Module | None, x: Tensor | None = None) -> bool:
    """Return whether a module is a `PackedLinear` for vil's C++ code, without hooks. x: tokens that
    it is called with; they must be computed in the dtype of its weights."""
    packed = type(layer) is PackedLinear and layer.native and not has_hooks(layer)
    return packed and (x is None or compute_dtype(x) == layer.dtype)


def can_pack(linear: nn.Module) -> bool:
    """Return whether a module can be replaced by a `PackedLinear`.

    It must be an nn.Linear on a CPU, in float32 or bfloat16 and without hooks, and torch must have
    oneDNN.
    """
    return (
        type(linear) is nn.Linear
        and not has_hooks(linear)
        and linear.weight.device.type == "cpu"
        and linear.weight.dtype in library.DTYPES
        and torch.backends.mkldnn.is_available()
    )
