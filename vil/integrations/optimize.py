"""Make a faster copy of a model for inference."""

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vil.layers.block import Block, mlp_weights
from vil.layers.fused_attention import PackedProjections, can_fuse
from vil.layers.linear import has_hooks
from vil.layers.packed_linear import InParts, PackedLinear, PackedMlp, can_pack
from vil.layers.packed_patches import PackedPatchEmbed, can_pack_embed
from vil.models.stage import Stage
from vil.ops.linear_case import MLP, NORM_LINEAR, is_tuned_native

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
    - Linear layers use oneDNN with reordered weights. In an MLP, the first linear layer also
      computes GELU or ReLU. MLPs process a few tokens at a time.
    - Convolutions use the channels-last format.
    - MLPs and attention projections use compiled C++ code if `vil tune` found it faster. If a
      stage has MLPs that use it, so does the stage's patch embedding.

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
        kept = _pack_blocks(fast, dtype)
    for module in [module for module in fast.modules() if module not in kept]:
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
    pack: whether to replace linear layers and MLPs.
    """
    if has_hooks(child):
        return child
    if type(child) in UNUSED or (fused and name == "act"):
        return nn.Identity()
    if pack and can_pack(child):
        return PackedLinear(child, fused if name == "fc1" else "")
    if (
        pack
        and type(child) is Mlp
        and can_pack(child.fc1)
        and not any(map(has_hooks, child.modules()))
    ):
        return InParts(child, child.fc1.out_features)
    return child


def _pack_blocks(model: nn.Module, dtype: torch.dtype) -> set[nn.Module]:
    """Make modules use vil's compiled C++ code, in place, and pack their weights for it.

    Attention projections and MLPs use this code if `vil tune` found it faster. If a stage has MLPs
    that use it, so does the stage's patch embedding. Returns the modules of the packed projections
    and MLPs, which the caller must not replace.
    """
    packed = set()
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        norm, attn = block.norm1, block.attn
        fusible = can_fuse(norm, attn) and norm.weight.device.type == "cpu"
        if fusible and is_tuned_native(NORM_LINEAR, attn.dim, 3 * attn.dim, dtype):
            packed.update(layer for layer in attn.children() if isinstance(layer, nn.Linear))
            attn.packed = PackedProjections(norm, attn)
        weights = mlp_weights(block.norm2, block.mlp)
        if not weights or weights.weight1.device.type != "cpu":
            continue
        if is_tuned_native(MLP, *weights.weight1.shape[::-1], dtype):
            block.mlp = PackedMlp(block.mlp, weights, block.norm2.eps)
            packed.update(block.mlp.modules())
    for stage in [module for module in model.modules() if isinstance(module, Stage)]:
        mlps = [getattr(block, "mlp", None) for block in stage.blocks]
        compiled = any(isinstance(mlp, PackedMlp) for mlp in mlps)
        if compiled and can_pack_embed(stage.embed):  # with the same matmul as MLPs
            stage.embed.packed = PackedPatchEmbed(stage.embed)
    return packed


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
