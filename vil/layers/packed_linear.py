"""Linear layers and MLPs for CPU inference, with weights packed for oneDNN or compiled C++ code.

Shapes: ... leading dimensions, I input and O output features.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vil.layers.linear import has_hooks
from vil.ops.mlp import MlpWeights, norm_mlp_packed, norm_mlp_torch, pack_weights
from vil.ops.native import library
from vil.ops.onednn import apply_in_parts, linear_packed, pack
from vil.utils.transforms import is_exporting, is_transformed


class PackedLinear(nn.Module):
    """A linear layer for inference, optionally followed by an activation. It has no gradients.

    linear: the layer whose weights (float32 or bfloat16) are copied to oneDNN's memory layout.
    activation: "gelu" (exact), "relu", or "" for none.
    The weights are not in the state dict. Save the state dict of the original model instead.
    """

    def __init__(self, linear: nn.Linear, activation: str = "") -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.activation = activation
        self.packed = pack(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach().clone()

    @property
    def weight(self) -> Tensor:
        """A copy of the weights (O, I)."""
        return self.packed.to_dense(self.packed.dtype)

    def __getstate__(self) -> dict[str, Any]:  # tensors of oneDNN can neither be copied nor pickled
        return {**super().__getstate__(), "packed": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "packed": pack(state["packed"])})

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., I) to (..., O)."""
        return linear_packed(x, self.packed, self.bias, self.activation)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, activation={self.activation!r}"


class Packed(nn.Module):
    """Base class of modules whose weights are packed for the compiled code on this machine.

    The attributes in `unpickled` are not pickled, because on another machine, the packed layout may
    differ. The method `pack` of a subclass sets them.
    """

    unpickled: tuple[str, ...] = ("packed",)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: x for name, x in state.items() if name not in self.unpickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.pack()

    def is_traced(self, x: Tensor) -> bool:
        """Return whether a call must use PyTorch's operators, because a tracer or a transform is
        active, or because x has a forward-mode tangent."""
        return torch.compiler.is_compiling() or is_exporting() or is_transformed(x)


class PackedMlp(Packed):
    """A layer norm followed by an MLP, for inference.

    `norm_mlp` computes both, with compiled code if possible. `forward` computes only the MLP, for
    tokens that are already normalized.

    mlp: the MLP module. weights: the parameters of the layer norm and of this MLP, float32 or
    bfloat16. eps: epsilon of the layer norm.
    """

    def __init__(self, mlp: nn.Module, weights: MlpWeights, eps: float) -> None:
        super().__init__()
        self.mlp, self.weights, self.eps = mlp, weights, eps
        self.pack()

    def pack(self) -> None:
        """Pack the weights if the compiled C++ code can run on this machine."""
        half = self.weights.weight1.dtype == torch.bfloat16
        ready = library.is_ready(self.weights.weight1.dtype)
        self.packed = pack_weights(self.weights, half=half) if ready else None

    def norm_mlp(self, x: Tensor, *, residual: bool) -> Tensor:
        """Return the output of the layer norm and the MLP for x (..., C), plus x if `residual`."""
        # the packed layout depends on the dtype
        if self.packed is None or self.is_traced(x) or x.dtype != self.weights.weight1.dtype:
            return norm_mlp_torch(x, self.weights, eps=self.eps, residual=residual)
        return norm_mlp_packed(x, self.packed, eps=self.eps, residual=residual)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the MLP for normalized tokens x (..., C)."""
        return self.mlp(x)


class InParts(nn.Module):
    """Wrapper that applies a module to a few tokens at a time, see `apply_in_parts`.

    module: a module that maps each token separately, as an MLP does.
    hidden: the largest number of features of a token inside the module.
    """

    def __init__(self, module: nn.Module, hidden: int) -> None:
        super().__init__()
        self.module, self.hidden = module, hidden

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., I) to (..., O), for a module with I input and O output features."""
        return apply_in_parts(self.module, x, self.hidden)


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
