"""Attention maps: the softmax weights of attention modules, for chosen queries.

Fused attention does not return the softmax weights, so each attention class recomputes them,
without dropout. For queries that are not padding, the sum of the values, weighted by the softmax
weights, is the attention output before the output projection.

Shapes: B batch, c input channels, H W image size, C channels, T tokens, N heads, Q queries, K keys.
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

    Returns `AttentionWeights`, which have the weights (B, N, Q, K) of Q queries over K keys in N
    heads. They are differentiable if gradients are enabled.

    images (B, c, H, W): model inputs. stage, block: indices of the stage, and of the block in the
    stage, from 0. Negative indices count from the end.
    queries: indices of tokens in the stage, where the global tokens come first; None for all.
    valid (B, 2): height and width of each image without its padding; None if no image is padded.
    Raises ValueError if the stage, block or token does not exist, if the model is not an MsViT, or
    if the block's attention does not compute a weight for each pair of query and key.
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


def attention_at(model: nn.Module, stage: int, block: int) -> Attention:
    """Return the attention module of a block of an MsViT.

    stage, block: indices of the stage, and of the block in the stage, from 0. Negative indices
    count from the end. Raises ValueError if the stage or block does not exist, or if the model is
    not an MsViT.
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

    Returns `AttentionWeights`, which have the weights (B, N, Q, K) of Q queries over K keys in N
    heads.

    module: the attention module. x (B, T, C): input tokens, global tokens first.
    grid: (rows, columns) of local tokens.
    queries: indices of tokens in x; None for all.
    valid_hw (B, 2): for each image, rows and columns of local tokens that are not padding; None if
    there is no padding.
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
