"""Attention maps: the softmax weights of attention modules, for chosen queries.

Fused attention does not return its weights. They are recomputed here from the module's query, key,
bias, window and padding, one row per chosen query. `weights @ values`, projected, is the module's
output for that token.

Shapes: B batch, N heads, D head dim, X Y grid, L = X*Y local tokens, G global tokens, T = G+L,
Q chosen queries, R key cells.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.layers.attention import (
    ATTENTIONS,
    Attention,
    FullAttention,
    GlobalOnlyAttention,
    LinformerAttention,
    LongformerAttention,
    PerformerAttention,
    SRAttention,
)
from vil.layers.attention.base import GlobalLocalAttention, padding_mask, real_tokens
from vil.models.vision_longformer import MsViT
from vil.ops.reference import meetings


class Weights(NamedTuple):
    """Attention weights of chosen queries.

    weights (B, N, Q, G+R): each row sums to 1; keys that are not attended to have exactly 0.
    grid: rows and columns of the tokens. cells: rows and columns of the R keys after the global
    ones. They equal the grid except for srformer, whose keys cover `ratio` x `ratio` tokens each.
    """

    weights: Tensor
    num_global: int
    grid: tuple[int, int]
    cells: tuple[int, int]
    ratio: int = 1


def attention_maps(
    model: nn.Module,
    images: Tensor,
    stage: int,
    block: int,
    queries: Sequence[int] | None = None,
    valid: Tensor | None = None,
) -> Weights:
    """Return the attention weights in one block. stage, block: indices, negative from the end.

    images (B, c, H, W). queries: tokens of the stage, global ones first; None for all. valid
    (B, 2): height and width of the real pixels of each image in a padded batch. Gradients flow if
    they are enabled.
    Raises ValueError for a missing stage, block or token, for a model that is not an MsViT, and for
    an attention without token weights.
    """
    module = attention_at(model, stage, block)
    x, grid, tokens = module_input(model, module, images, valid)
    return token_weights(module, x, grid, queries, tokens)


def attention_at(model: nn.Module, stage: int, block: int) -> Attention:
    """Return the attention module of a block. ValueError, with the valid range, if missing."""
    if not isinstance(model, MsViT):
        raise ValueError(f"{type(model).__name__} is not an MsViT, so it has no attention maps")
    depths = [len(each.blocks) for each in model.stages]
    if not -len(depths) <= stage < len(depths):
        raise ValueError(f"there is no stage of index {stage}: the model has {len(depths)}")
    if not -depths[stage] <= block < depths[stage]:
        raise ValueError(f"there is no block of index {block}: the stage has {depths[stage]}")
    return model.stages[stage].blocks[block].attn


def module_input(
    model: MsViT, module: Attention, images: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, tuple[int, int], Tensor | None]:
    """Return the arguments of `module`: tokens (B, T, C), grid, valid in tokens (B, 2) or None."""
    calls: list[tuple] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    try:
        model.forward_intermediates(images, intermediates_only=True, valid=valid)
    finally:
        hook.remove()
    return calls[0]


def token_weights(
    module: Attention,
    x: Tensor,
    grid: tuple[int, int],
    queries: Sequence[int] | None = None,
    valid: Tensor | None = None,
) -> Weights:
    """Return the weights of `module(x, grid, valid)` without dropout. See `attention_maps`.

    x (B, T, C), valid (B, 2) in tokens.
    """
    tokens = x.shape[1]
    queries = range(tokens) if queries is None else queries
    wrong = [query for query in queries if not 0 <= query < tokens]
    if wrong:
        raise ValueError(f"there is no token {wrong[0]}: the map has {tokens}, global ones first")
    find = ROWS.get(type(module), _refuse)
    return find(module, x, grid, torch.tensor(list(queries), device=x.device), valid)


def _refuse(module: Attention, *_) -> Weights:
    name = next((n for n, kind in ATTENTIONS.items() if kind is type(module)), type(module))
    reason = REFUSED.get(type(module), "nothing here knows how it weighs tokens")
    raise ValueError(f"{name} attention has no map: {reason}")


def _of_full(module: FullAttention, x, grid, queries, valid) -> Weights:
    q, k, _ = module.split_parts(module.qkv(x), 3)
    scores = _scores(module, q[:, :, queries], k)
    if module.rel_pos:
        scores = scores + module.bias(grid, valid)[:, :, queries]
    if valid is not None:
        scores = scores + padding_mask(valid, grid, module.num_global, scores.dtype)
    return Weights(scores.softmax(-1), module.num_global, grid, grid)


def _of_global_and_local(module: GlobalLocalAttention, x, grid, queries, valid) -> Weights:
    """Rows of global tokens and rows of local tokens, put into the order asked for."""
    is_global = queries < module.num_global
    wide = torch.promote_types(x.dtype, torch.float32)
    found = x.new_zeros(len(x), module.num_heads, len(queries), x.shape[1], dtype=wide)
    found[:, :, is_global] = _global_rows(module, x, grid, queries[is_global], valid)
    find = _window_rows if isinstance(module, LongformerAttention) else _only_global_rows
    found[:, :, ~is_global] = find(module, x, grid, queries[~is_global], valid)
    return Weights(found, module.num_global, grid, grid)


def _global_rows(module: GlobalLocalAttention, x, grid, queries, valid) -> Tensor:
    """(B, N, Q, T): a global token attends to everything."""
    query, kv = (
        (module.query_global, module.kv_global) if module.separate else (module.query, module.kv)
    )
    q = module.split_heads(query(x[:, queries]))
    scores = _scores(module, q, module.split_parts(kv(x), 2)[0])
    if module.rel_pos and len(queries):
        to_local = module.g2l_relative_position_bias[0][:, queries, None]
        to_local = to_local.expand(-1, -1, grid[0] * grid[1])
        to_global = module.g2g_relative_position_bias[:, queries]
        scores = scores + torch.cat([to_global, to_local], dim=-1)
    if valid is not None:
        scores = scores + padding_mask(valid, grid, module.num_global, scores.dtype)
    return scores.softmax(-1)


def _only_global_rows(module: GlobalOnlyAttention, x, grid, queries, valid) -> Tensor:
    """(B, N, Q, T): a local token attends to the global ones alone."""
    q, k = module.split_heads(module.query(x[:, queries])), module.split_parts(module.kv(x), 2)[0]
    weights = _scores(module, q, k[:, :, : module.num_global]).softmax(-1)
    return F.pad(weights, (0, grid[0] * grid[1]))


def _window_rows(module: LongformerAttention, x, grid, queries, valid) -> Tensor:
    """(B, N, Q, T): a local token attends to the global ones and to its window."""
    q, k = module.split_heads(module.query(x[:, queries])), module.split_parts(module.kv(x), 2)[0]
    scores = _scores(module, q, k)
    rows = [
        _window_row(module, scores[:, :, number], grid, query - module.num_global, valid)
        for number, query in enumerate(queries.tolist())
    ]
    return torch.stack(rows, dim=2) if rows else scores


def _window_row(module: LongformerAttention, scores, grid, query: int, valid) -> Tensor:
    """scores (B, N, T) of the local token `query` -> its weights (B, N, T).

    A key that a small cyclic grid offers twice is met twice, each time with its own bias: its
    weights add up. A row that sees nothing is all zeros, as its output is.
    """
    bias, num_global = module.bias(), module.num_global
    met = meetings(module.window(grid), *divmod(query, grid[1]))
    row, col, index = torch.tensor(met, device=scores.device).reshape(-1, 3).unbind(1)
    keys = num_global + row * grid[1] + col
    keys = torch.cat([torch.arange(num_global, device=scores.device), keys])
    scores = scores[:, :, keys]
    if bias is not None:
        parts = [bias.table[:, index]]
        if bias.to_global is not None:
            parts.insert(0, bias.to_global)
        scores = scores + torch.cat(parts, dim=-1)
    if valid is not None:
        real = real_tokens(valid, grid, num_global)[:, keys]
        scores = scores.masked_fill(~real[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    whole = weights.new_zeros(*weights.shape[:2], num_global + grid[0] * grid[1])
    return whole.index_add(2, keys, weights)


def _of_performer(module: PerformerAttention, x, grid, queries, valid) -> Weights:
    """The products of random features, normalised: what stands there for a softmax."""
    q, k, _ = module.split_parts(module.qkv(x), 3)
    features = module.fast_attention
    real = None if valid is None else real_tokens(valid, grid, module.num_global)
    wide = torch.promote_types(q.dtype, torch.float32)
    of_queries = features.query_features(q[:, :, queries].to(wide))
    weights = of_queries @ features.key_features(k.to(wide), real).mT
    weights = weights / weights.sum(-1, keepdim=True)
    return Weights(weights, module.num_global, grid, grid)


def _of_srformer(module: SRAttention, x, grid, queries, valid) -> Weights:
    reduced, mask = module.reduce(x[:, module.num_global :], grid, valid)
    kv = module.kv(torch.cat([x[:, : module.num_global], reduced.to(x.dtype)], dim=1))
    q = module.split_heads(module.query(x[:, queries]))
    scores = _scores(module, q, module.split_parts(kv, 2)[0])
    scores = scores if mask is None else scores + mask.to(scores.dtype)
    weights = scores.softmax(-1)
    return Weights(weights, module.num_global, grid, module.cells(grid), module.ratio)


def _scores(module: Attention, q: Tensor, k: Tensor) -> Tensor:
    """(B, N, Q, keys), in float32 at least."""
    scores = (q * module.scale) @ k.mT
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


ROWS: dict[type[Attention], Callable[..., Weights]] = {
    FullAttention: _of_full,
    LongformerAttention: _of_global_and_local,
    GlobalOnlyAttention: _of_global_and_local,
    PerformerAttention: _of_performer,
    SRAttention: _of_srformer,
}
REFUSED = {
    LinformerAttention: "it attends to mixtures of all tokens, whose weights are of both signs"
}
