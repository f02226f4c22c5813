"""Compute a block without gradients in one call of the compiled code, as `vil.ops.block` does.

Whether a block can be computed so depends on much, so the answer is kept for the next call: per
block, for the last shape of tokens and the last state of the modules.

Shapes: B batch, T tokens, C channels.
"""

import operator
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vil.layers.attention.full import FullAttention, one_chunk
from vil.layers.attention.local import LocalAttention
from vil.layers.attention.overrides import overrides
from vil.layers.fused_attention import is_fused, is_joined, join_projections
from vil.layers.fused_mlp import mlp_weights
from vil.layers.linear import has_hooks
from vil.layers.packed_linear import is_packed
from vil.layers.padding import Grid
from vil.ops.block import BlockCall, BlockWeights
from vil.ops.dispatch import CHOICES
from vil.ops.linear import Norm
from vil.ops.linear_case import LINEAR_RESIDUAL, MLP, NORM_LINEAR, compute_dtype, is_native
from vil.ops.mlp import MlpWeights
from vil.ops.native import library
from vil.ops.operator_call import is_watched
from vil.utils.transforms import is_transformed


class _Plan(NamedTuple):
    """The call that computes a block, or None if there is none, and what must not have changed.

    state: see `_state`. modules, tensors: of the block, with its parameters. pointers: the
    addresses of the tensors.
    """

    state: tuple
    call: BlockCall | None = None
    modules: tuple[nn.Module, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    pointers: tuple[int, ...] = ()


_plans: WeakKeyDictionary[nn.Module, _Plan] = WeakKeyDictionary()


def fused_block(block: nn.Module, x: Tensor, grid: Grid) -> Tensor | None:
    """Return a block's output for tokens x (B, T, C), or None if it has to be computed otherwise.

    block: a `vil.layers.block.Block` whose DropPath drops nothing.
    """
    attn, mlp = block.attn, block.mlp
    if torch.is_grad_enabled() or is_watched(x) or is_transformed(x) or not x.is_contiguous():
        return None
    if not isinstance(attn, FullAttention | LocalAttention) or x.dtype not in library.DTYPES:
        return None
    modules = (*block._modules.values(), *attn._modules.values(), *mlp._modules.values())
    state = _state(block, x, grid, modules)
    plan = _plans.get(block)
    if plan is None or plan.state != state or not _holds(plan, modules):
        tensors = tuple(_parameters(modules))
        pointers = tuple(tensor.data_ptr() for tensor in tensors)
        call = None if _hooked(modules) else _prepare(block, x, grid)
        plan = _plans[block] = _Plan(state, call, modules, tensors, pointers)
    return plan.call and plan.call(x)


def _state(block: nn.Module, x: Tensor, grid: Grid, modules: tuple[nn.Module, ...]) -> tuple:
    """Return what a call depends on, other than the parameters and hooks of the modules."""
    attn = block.attn
    return (  # of few objects, because the caches of the CPU are cold
        x.shape,
        x.dtype,
        compute_dtype(x),
        attn.window(grid) if isinstance(attn, LocalAttention) else grid,
        (type(attn).attend_qkv, len(vars(attn))),  # a replaced method is a new attribute
        (attn.backend, attn.num_heads, attn.num_global, attn.scale, attn.rel_pos, attn.attn_drop),
        [getattr(module, "eps", 0.0) for module in (block.norm1, block.norm2)],
        [module.training for module in modules],
        torch.get_num_threads(),
        list(CHOICES.items()),
    )


def _holds(plan: _Plan, modules: tuple[nn.Module, ...]) -> bool:
    """Return whether the modules, their parameters and their hooks are those of a plan. Without a
    call, only the modules are compared."""
    if plan.modules != modules:
        return False
    tensors = plan.tensors
    return plan.call is None or not (
        _hooked(modules)
        or any(map(operator.is_not, tensors, _parameters(modules)))
        or plan.pointers != tuple(map(Tensor.data_ptr, tensors))
    )


def _parameters(modules: tuple[nn.Module, ...]) -> Iterator[Tensor]:
    return (x for module in modules for x in module._parameters.values() if x is not None)


def _hooked(modules: tuple[nn.Module, ...]) -> bool:
    return any(map(has_hooks, modules))


def _prepare(block: nn.Module, x: Tensor, grid: Grid) -> BlockCall | None:
    """Return the call that computes a block, or None if the compiled code does not compute all its
    layers, or would have to copy parameters that may change."""
    norm, attn, mlp = block.norm1, block.attn, block.mlp
    if overrides(attn, ["attend_qkv"]):
        return None
    weights = mlp_weights(block.norm2, mlp)
    if weights is None or attn.rel_pos or not is_fused(norm, attn, x, residual=True):
        return None
    packed, dim, hidden = is_joined(attn), x.shape[-1], len(weights.bias1)
    kinds = ((NORM_LINEAR, 3 * dim), (LINEAR_RESIDUAL, dim), (MLP, hidden))
    if packed:
        first, last = ((layer.packed, layer.bias) for layer in (attn.joined, attn.proj))
    else:
        first, last = join_projections(attn), (attn.proj.weight, attn.proj.bias)
    qkv = x.new_empty(*x.shape[:2], 3 * dim, dtype=compute_dtype(x))
    if isinstance(attn, LocalAttention):
        window, num_global = attn.window(grid), attn.num_global
        native = attn.is_native(qkv, window)
    else:
        window, num_global = one_chunk((1, x.shape[1])), 0
        native = attn.is_native(qkv, grid, None)
    given = (norm.weight, norm.bias, *first, *last, *weights)
    floats = [x if x is None else x.float().contiguous() for x in given]
    if packed:  # the parameters of an optimized model do not change
        able = is_packed(mlp.fc1, x) and norm.weight.shape == (dim,)
    else:
        shapes = [(dim,)] * 2 + [(3 * dim, dim), (3 * dim,), (dim, dim)] + [(dim,)] * 3
        shapes += [(hidden, dim), (hidden,), (dim, hidden), (dim,)]
        able = not is_packed(mlp.fc1) and all(is_native(kind, x, size) for kind, size in kinds)
        able = able and not any(map(operator.is_not, floats, given))
        able = able and all(x is None or x.shape == size for x, size in zip(given, shapes))
    if not able or not native or dim % attn.num_heads:
        return None
    gain, shift, *linear = floats
    own = BlockWeights(
        Norm(gain, shift, norm.eps), (linear[0], linear[1]), (linear[2], linear[3]),
        MlpWeights(*linear[4:]), block.norm2.eps,
    )  # fmt: skip
    options = dict(num_heads=attn.num_heads, num_global=num_global, scale=attn.scale)
    half = compute_dtype(x) == torch.bfloat16
    return BlockCall(x, own, window, half=half, packed=packed, **options)
