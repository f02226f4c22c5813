"""Attention maps: the softmax weights of attention modules, for chosen queries.

Fused attention does not return the softmax weights, so each attention class recomputes them,
without dropout.

Shapes: B batch, c input channels, H W image size, C channels, T tokens, N heads, Q queries, K keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vil.layers.attention import Attention
from vil.layers.attention.base import AttentionWeights
from vil.models.stage import store_activations
from vil.models.vision_longformer import MsViT


def attention_maps(
    model: MsViT,
    images: Tensor,
    stage: int,
    block: int,
    queries: Sequence[int] | None = None,
    valid: Tensor | None = None,
) -> AttentionWeights:
    """Return the attention weights of chosen queries in one block of an MsViT.

    The result has the weights (B, N, Q, K) of Q queries over K keys in N heads. They are
    differentiable if gradients are enabled.

    images (B, c, H, W): model inputs.
    stage, block: indices of the stage, and of the block in the stage. Negative indices count from
    the end.
    queries: indices of tokens in the stage, global tokens first; None for all.
    valid (B, 2): unpadded height and width of each image; None if no image is padded. If it is
    given, the grids are those of `MsViT.forward_intermediates`, which extends the padding.
    Raises ValueError if the stage, block or token does not exist, if the model is not an MsViT, or
    if the block's attention has no weight for each query and key.
    """
    module, calls = attention_at(model, stage, block), []
    hook = module.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    try:
        with store_activations(model):  # otherwise x would have no gradient
            model.forward_intermediates(images, intermediates_only=True, valid=valid)
    finally:
        hook.remove()
    x, grid, valid_hw = calls[0]
    return token_weights(module, x, grid, queries, valid_hw)


def attention_at(model: MsViT, stage: int, block: int) -> Attention:
    """Return the attention module of a block of an MsViT.

    stage, block: indices of the stage, and of the block in the stage. Negative indices count from
    the end. Raises ValueError if the block does not exist, or the model is not an MsViT.
    """
    if not isinstance(model, MsViT):
        raise ValueError(f"{type(model).__name__} is not an MsViT, so it has no attention maps")
    depths = [len(each.blocks) for each in model.stages]
    if not -len(depths) <= stage < len(depths):
        count = len(depths)
        raise ValueError(f"there is no stage with index {stage}: the model has {count} stages")
    if not -depths[stage] <= block < depths[stage]:
        raise ValueError(
            f"there is no block with index {block}: the stage has {depths[stage]} blocks"
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

    The result has the weights (B, N, Q, K) of Q queries over K keys in N heads.

    x (B, T, C): input tokens, global tokens first. grid: (rows, columns) of local tokens. queries:
    indices of tokens in x; None for all. valid_hw (B, 2): unpadded rows and columns of each image.
    Raises ValueError if a token in `queries` does not exist.
    """
    tokens = x.shape[1]
    queries = range(tokens) if queries is None else queries
    wrong = [query for query in queries if not 0 <= query < tokens]
    if wrong:
        raise ValueError(
            f"there is no token with index {wrong[0]}: the stage has {tokens} tokens, including "
            "the global tokens"
        )
    x = module.hide_padding(x, valid_hw, grid)
    return module.attention_weights(x, grid, torch.tensor(list(queries), device=x.device), valid_hw)
