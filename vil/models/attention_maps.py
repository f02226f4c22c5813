"""Attention maps: the softmax weights of attention modules, for chosen queries.

Fused attention does not return its weights. Each attention class recomputes them from its query,
key, bias, window and padding, one row per chosen query. `weights @ values`, projected, is the
module's output for that token.

Shapes: B batch, N heads, D head dim, X Y grid, L = X*Y local tokens, G global tokens, T = G+L,
Q chosen queries, R key cells.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vil.layers.attention import Attention
from vil.layers.attention.base import AttentionWeights
from vil.models.vision_longformer import MsViT


def attention_maps(
    model: nn.Module,
    images: Tensor,
    stage: int,
    block: int,
    queries: Sequence[int] | None = None,
    valid: Tensor | None = None,
) -> AttentionWeights:
    """Return the attention weights in one block. stage, block: indices, negative from the end.

    images (B, c, H, W). queries: tokens of the stage, global ones first; None for all. valid
    (B, 2): height and width of the real pixels of each image in a padded batch. Gradients flow if
    they are enabled.
    Raises ValueError for a missing stage, block or token, for a model that is not an MsViT, and for
    an attention without token weights.
    """
    module, calls = attention_at(model, stage, block), []
    hook = module.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    try:
        model.forward_intermediates(images, intermediates_only=True, valid=valid)
    finally:
        hook.remove()
    x, grid, valid_hw = calls[0]
    return token_weights(module, x, grid, queries, valid_hw)


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


def token_weights(
    module: Attention,
    x: Tensor,
    grid: tuple[int, int],
    queries: Sequence[int] | None = None,
    valid_hw: Tensor | None = None,
) -> AttentionWeights:
    """Return the weights of `module(x, grid, valid_hw)` without dropout. See `attention_maps`.

    x (B, T, C), valid_hw (B, 2) in tokens.
    """
    tokens = x.shape[1]
    queries = range(tokens) if queries is None else queries
    wrong = [query for query in queries if not 0 <= query < tokens]
    if wrong:
        raise ValueError(f"there is no token {wrong[0]}: the map has {tokens}, global ones first")
    return module.attention_weights(x, grid, torch.tensor(list(queries), device=x.device), valid_hw)
