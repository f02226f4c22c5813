"""Attention maps: the softmax weights of attention modules, for chosen queries.

Fused attention does not return its weights, so each attention class recomputes them, without
dropout. If the weights of a query are multiplied with the values and projected, the result is the
output of the attention module for this query, unless the query is padding.

Shapes: B batch, c input channels, H W image size, C channels, T tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vil.layers.attention import Attention
from vil.layers.attention.base import AttentionWeights
from vil.models.stage import store_activations
from vil.models.vision_longformer import MsViT


def attention_maps(
    model: nn.Module,
    images: Tensor,
    stage: int,
    block: int,
    queries: Sequence[int] | None = None,
    valid: Tensor | None = None,
) -> AttentionWeights:
    """Return the attention weights of chosen queries in one block of an MsViT.

    images (B, c, H, W). stage, block: indices; negative ones count from the end.
    queries: token indices in the stage, global tokens first; None for all.
    valid (B, 2): height and width of each image without its padding.
    Gradients are computed if they are enabled.
    Raises ValueError for a missing stage, block or token, for a model that is not an MsViT, and for
    an attention without token weights.
    """
    module, calls = attention_at(model, stage, block), []
    hook = module.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    try:
        with store_activations(model):  # else the hook's tensors have no gradient
            model.forward_intermediates(images, intermediates_only=True, valid=valid)
    finally:
        hook.remove()
    x, grid, valid_hw = calls[0]
    return token_weights(module, x, grid, queries, valid_hw)


def attention_at(model: nn.Module, stage: int, block: int) -> Attention:
    """Return the attention module of a block of an MsViT.

    stage, block: indices; negative ones count from the end. Raises ValueError if the stage or block
    is missing, or if the model is not an MsViT.
    """
    if not isinstance(model, MsViT):
        raise ValueError(f"{type(model).__name__} is not an MsViT, so it has no attention maps")
    depths = [len(each.blocks) for each in model.stages]
    if not -len(depths) <= stage < len(depths):
        raise ValueError(f"there is no stage of index {stage}: the model has {len(depths)} stages")
    if not -depths[stage] <= block < depths[stage]:
        raise ValueError(
            f"there is no block of index {block}: the stage has {depths[stage]} blocks"
        )
    return model.stages[stage].blocks[block].attn


def token_weights(
    module: Attention,
    x: Tensor,
    grid: tuple[int, int],
    queries: Sequence[int] | None = None,
    valid_hw: Tensor | None = None,
) -> AttentionWeights:
    """Return the attention weights of chosen queries in the call `module(x, grid, valid_hw)`.

    x (B, T, C). queries: see `attention_maps`. valid_hw (B, 2): rows and columns of tokens that are
    not padding. Raises ValueError if an index in `queries` is not that of a token.
    """
    tokens = x.shape[1]
    queries = range(tokens) if queries is None else queries
    wrong = [query for query in queries if not 0 <= query < tokens]
    if wrong:
        raise ValueError(
            f"there is no token with index {wrong[0]}: the stage has {tokens} tokens, the global "
            "tokens first"
        )
    x = module.hide_padding(x, valid_hw, grid)
    return module.attention_weights(x, grid, torch.tensor(list(queries), device=x.device), valid_hw)
