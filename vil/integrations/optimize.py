"""Make a faster copy of a model for inference."""

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vil.layers.block import Block
from vil.layers.fused_attention import can_fuse, join_projections
from vil.layers.fused_mlp import mlp_weights
from vil.layers.linear import has_hooks
from vil.layers.packed_linear import PackedLinear, can_pack
from vil.ops.linear_case import MLP, NORM_LINEAR, is_packed_native

FUSED = {nn.GELU: "gelu", nn.ReLU: "relu"}  # activations that a PackedLinear can apply
UNUSED = (nn.Dropout, DropPath)  # identities in evaluation


class OptimizedModel(nn.Module):
    """Model that `optimize_for_inference` returns. It cannot be trained.

    model: the optimized copy of the original model. Its methods, such as
    `model.forward_features`, can be called directly with input tensors of type `dtype`.
    dtype: type of the parameters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model without autograd. Floating-point inputs are converted to `dtype`, and
        outputs to float32."""
        return self.call(self.model, *args, **kwargs)

    @torch.compiler.disable  # it cannot trace the tensors that inference_mode makes
    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call a function that runs `model`, such as `model.forward_features`, without autograd.

        Floating-point inputs are converted to `dtype`, and outputs to float32, as in `forward`.
        """
        args, kwargs = tree_map(lambda x: convert(x, self.dtype), (args, kwargs))
        with torch.inference_mode(), torch.autocast(device_of(self.model), enabled=False):
            return tree_map(lambda x: convert(x, torch.float32), function(*args, **kwargs))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OptimizedModel":
        """Apply `fn` to all parameters and buffers. `to`, `cuda` and `half` call this method.

        Raises RuntimeError if the model is on a CPU and `fn` moves tensors to another device or
        converts them to another dtype, because `fn` does not change packed weights.
        """
        if device_of(self.model) == "cpu":
            old = torch.empty(0, dtype=self.dtype)
            new = fn(old)
            if (new.device, new.dtype) != (old.device, old.dtype):
                raise RuntimeError(
                    "a model optimized for inference on a CPU cannot be moved to another device or "
                    f"converted to another dtype ({new.device}, {new.dtype}): move or convert the "
                    "original model, then optimize it again"
                )
        return super()._apply(fn, recurse)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights, see `nn.Module.load_state_dict`.

        Raises RuntimeError if the model is on a CPU, because weights that were reordered for the
        CPU would not change.
        """
        if device_of(self.model) == "cpu":
            raise RuntimeError(
                "weights cannot be loaded into a model optimized for inference on a CPU: load them "
                "into the original model, then optimize it again"
            )
        return super().load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> "OptimizedModel":
        if mode:
            raise RuntimeError(
                "a model optimized for inference cannot be trained: train the original model"
            )
        return super().train(mode)


def optimize_for_inference(
    model: nn.Module, *, dtype: torch.dtype = torch.float32, compile: bool = False
) -> OptimizedModel:
    """Return a faster copy of a model, for inference only. `model` is not changed.

    Parameters are converted to `dtype` once, not in every forward pass as under autocast. Dropout
    and stochastic depth are removed. Up to rounding, the outputs are the same as those of the model
    in `dtype`. Modules with hooks are not replaced.

    On a CPU, in float32 or bfloat16:
    - The weights of linear layers are packed, in the memory layout of a matmul. In the blocks of
      vil's models, it is that of vil's compiled C++ code where this is faster (see
      `vil.ops.linear_case`). Elsewhere it is that of oneDNN. In an MLP, oneDNN's first linear layer
      also computes GELU or ReLU.
    - Convolutions use the channels-last format.

    model: a model of this package, of timm, or any other module.
    dtype: type to which parameters and inputs are converted.
    compile: use `torch.compile` with the option `freezing` instead of the optimizations for a CPU.

    Raises ValueError if dtype is not a floating-point type.
    """
    if not dtype.is_floating_point:
        raise ValueError(
            f"optimize_for_inference: dtype must be a floating-point type, not {dtype}"
        )
    fast = copy.deepcopy(model).eval().requires_grad_(False).to(dtype)
    kept: set[nn.Module] = set()
    if not compile:
        _use_channels_last(fast)
        kept = {layer for block in [*fast.modules()] for layer in _pack_block(block, dtype)}
    for module in list(fast.modules()):
        fused = "" if compile else _fused_activation(module)
        for name, child in list(module.named_children()):
            if child not in kept:
                setattr(module, name, _replacement(child, name, fused, pack=not compile))
    optimized = OptimizedModel(fast, dtype)
    if compile:
        fast.compile(options={"freezing": True})
    return optimized


def _replacement(child: nn.Module, name: str, fused: str, *, pack: bool) -> nn.Module:
    """Return a faster replacement for the module `child`, or `child` if there is none.

    name: attribute of the parent that holds `child`.
    fused: "gelu" or "relu" if the parent is an MLP whose first linear layer will also compute this
    activation, or "".
    pack: whether to replace linear layers.
    """
    if has_hooks(child):
        return child
    if type(child) in UNUSED or (fused and name == "act"):
        return nn.Identity()
    if pack and can_pack(child):
        return PackedLinear(child.weight, child.bias, fused if name == "fc1" else "")
    return child


def _pack_block(block: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """Pack the weights of a vil `Block` for the compiled C++ code, in place.

    The attention projections are packed if this code is selected for them, and so is the MLP. Other
    modules, and blocks on other devices, are not changed. Returns the linear layers that the caller
    must not replace.
    """
    if not isinstance(block, Block) or block.norm1.weight.device.type != "cpu":
        return []
    norm, attn, mlp = block.norm1, block.attn, block.mlp
    kept: list[nn.Module] = []
    if can_fuse(norm, attn) and is_packed_native(NORM_LINEAR, attn.dim, 3 * attn.dim, dtype):
        attn.joined = PackedLinear(*join_projections(attn), native=True)
        attn.proj = PackedLinear(attn.proj.weight, attn.proj.bias, native=True)
        if len(attn.projections) == 1:
            setattr(attn, attn.projections[0], attn.joined)
        else:  # with hooks or padding, these are used instead of the joined layer
            kept = [getattr(attn, name) for name in attn.projections]
    weights = mlp_weights(block.norm2, mlp)
    if weights and is_packed_native(MLP, *weights.weight1.shape[::-1], dtype):
        mlp.fc1, mlp.fc2 = (PackedLinear(x.weight, x.bias, native=True) for x in (mlp.fc1, mlp.fc2))
    return kept


def _use_channels_last(model: nn.Module) -> None:
    """Store the weights of 2-D convolutions on a CPU in channels-last format, in place.

    oneDNN then computes in this format, even if the images have another format. This makes
    convolutional networks faster, most of all in bfloat16.
    """
    for conv in model.modules():
        if isinstance(conv, nn.Conv2d) and conv.weight.device.type == "cpu":
            conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)


def _fused_activation(module: nn.Module) -> str:
    """Return "gelu" or "relu" if a module is an MLP with this activation, and its first linear
    layer can also compute the activation. Returns "" for other activations and modules."""
    if type(module) is not Mlp or not can_pack(module.fc1):
        return ""
    act = module.act
    if has_hooks(act) or getattr(act, "approximate", "none") != "none":
        return ""
    return FUSED.get(type(act), "")


def convert(x: Any, dtype: torch.dtype) -> Any:
    """Convert x to a dtype if x is a floating-point tensor. Otherwise return x unchanged."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def device_of(model: nn.Module) -> str:
    """Return the device type of a model's parameters and buffers, or "cpu" if it has none."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return "cpu" if tensor is None else tensor.device.type
