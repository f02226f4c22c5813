"""Compute the attention branch of a block in fewer passes over the tokens.

The layer norm and the projections to queries, keys and values are one operation. The output
projection and the residual connection are another.

Shapes: B batch, T tokens, C channels.
"""

from functools import partial

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention, GlobalLocalAttention
from vil.layers.attention.full import FullAttention
from vil.layers.linear import drops, has_hooks, has_plain_type, is_plain
from vil.layers.packed_linear import Packed
from vil.layers.padding import Grid
from vil.ops.linear import Norm, linear, linear_native, pack_weight
from vil.ops.linear_case import LINEAR, LINEAR_RESIDUAL, NORM_LINEAR, compute_dtype, is_native
from vil.ops.native import library

# methods that `attend_fused` replaces
FORWARDS = (FullAttention.forward, GlobalLocalAttention.forward)


def is_fused(norm: nn.Module, attn: nn.Module, x: Tensor, *, residual: bool = False) -> bool:
    """Return whether `attend_fused` should compute attn(norm(x)), plus x if `residual`.

    With packed weights, the compiled code must support x (B, T, C), and no module may have hooks.
    Without them, `can_fuse` must be true, and tuning must have found compiled code faster for the
    projections to q, k and v, or for the output projection.
    """
    if packed := getattr(attn, "packed", None):
        return packed.can_run(x) and not any(map(has_hooks, (norm, attn, *attn.children())))
    last = LINEAR_RESIDUAL if residual else LINEAR
    native = is_native(NORM_LINEAR, x, 3 * x.shape[-1]) or is_native(last, x, x.shape[-1])
    return native and can_fuse(norm, attn)


def can_fuse(norm: nn.Module, attn: nn.Module, training: bool | None = None) -> bool:
    """Return whether `attend_fused` computes the same result as a block's norm and attention.

    Returns False if one of these modules was replaced, has hooks or applies dropout to its outputs,
    if a subclass overrides `forward`, or if global tokens have separate projections. training: see
    `drops`.
    """
    if type(attn).forward not in FORWARDS or getattr(attn, "separate", False):
        return False
    drop = attn.proj_drop
    if type(norm) is not nn.LayerNorm or type(drop) not in (nn.Dropout, nn.Identity):
        return False
    if drops(drop, training) or any(map(has_hooks, (norm, attn, drop))):
        return False
    layers = [getattr(attn, name) for name in attn.projections]
    if len({layer.bias is None for layer in filter(is_plain, layers)}) != 1:
        return False  # no layer is plain, or only some have a bias
    plain = map(is_plain, (*layers, attn.proj))
    return all(map(has_plain_type, (norm.weight, norm.bias))) and all(plain)


class PackedProjections(Packed):
    """The parameters of a block's layer norm and attention, with packed weights, for inference.

    norm, attn: the block's modules, with parameters in float32 or bfloat16. `can_fuse` must be true
    for them. The parameters are detached, so they get no gradients.
    """

    def __init__(self, norm: nn.LayerNorm, attn: Attention) -> None:
        super().__init__()
        self.norm = Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)
        layers = join_projections(attn), (attn.proj.weight, attn.proj.bias)
        self.weights = [weight.detach() for weight, _ in layers]
        self.biases = [None if bias is None else bias.detach() for _, bias in layers]
        self.pack()

    def pack(self) -> None:
        """Pack the weights if the compiled code can run on this machine."""
        half = self.weights[0].dtype == torch.bfloat16
        ready = library.is_ready(self.weights[0].dtype)
        self.packed = [pack_weight(w, half=half) for w in self.weights] if ready else None

    def can_run(self, x: Tensor) -> bool:
        """Return whether the compiled code can compute a call for x (B, T, C)."""
        if x.device.type != "cpu" or self.is_traced(x):
            return False
        dtype = self.weights[0].dtype  # the packed layout depends on it
        return self.packed is not None and x.dtype == compute_dtype(x) == dtype


def join_projections(attn: Attention) -> tuple[Tensor, Tensor | None]:
    """Return the concatenated weights (3C, C) and biases (3C,) of the projections to q, k and v.

    The second value is None if the projections have no biases.
    """
    layers = [getattr(attn, name) for name in attn.projections]
    weight = _join([layer.weight for layer in layers])
    return weight, None if layers[0].bias is None else _join([layer.bias for layer in layers])


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def attend_fused(
    norm: nn.LayerNorm, attn: Attention, x: Tensor, grid: Grid, *, residual: bool = False
) -> Tensor:
    """Return attn(norm(x), grid) for x (B, T, C), plus x itself if `residual`."""
    if packed := getattr(attn, "packed", None):
        compute, norm = partial(linear_native, packed=True), packed.norm
        first, last = zip(packed.packed, packed.biases)
    else:
        compute, norm = linear, Norm(norm.weight, norm.bias, norm.eps)
        first, last = join_projections(attn), (attn.proj.weight, attn.proj.bias)
    qkv = compute(x, *first, norm=norm)
    out = attn.attend_qkv(qkv, grid)
    return compute(out, *last, residual=x if residual else None)
