"""What tokens attend to: the softmax weights of a model's attention modules, for a few queries.

Fused attention does not return its weights. Each attention class recomputes them from its query,
key, bias, window and padding, one row per query, so that a map of any size costs no more than its
rows: `weights @ values`, projected, is the module's output for that token.

Shapes: B batch, T tokens, C channels, c image channels, H W image size.
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
    """The weights in one block, both counted from 0, negative from the end, as in Python.

    images (B, c, H, W). queries: tokens of the stage, global ones first; None for all. valid
    (B, 2): height and width of each image's real pixels. Gradients are kept if they are enabled.
    Raises ValueError for a stage, block or token that there is not, a model without stages, and an
    attention whose weights are none of tokens.
    """
    module = attention_at(model, stage, block)
    x, grid, tokens = module_input(model, module, images, valid)
    return token_weights(module, x, grid, queries, tokens)


def attention_at(model: nn.Module, stage: int, block: int) -> Attention:
    """The attention module of a block. ValueError with what there is."""
    if not isinstance(model, MsViT):
        raise ValueError(f"{type(model).__name__} has no stages of ours, so no maps of attention")
    depths = [len(each.blocks) for each in model.stages]
    if not -len(depths) <= stage < len(depths):
        raise ValueError(f"there is no stage of index {stage}: the model has {len(depths)}")
    if not -depths[stage] <= block < depths[stage]:
        raise ValueError(f"there is no block of index {block}: the stage has {depths[stage]}")
    return model.stages[stage].blocks[block].attn


def module_input(
    model: MsViT, module: Attention, images: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, tuple[int, int], Tensor | None]:
    """What `module` is called with: tokens (B, T, C), grid, valid in tokens (B, 2) or None."""
    met: list[tuple] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: met.append(arguments))
    try:
        model.forward_stages(images, valid)
    finally:
        hook.remove()
    return met[0]


def token_weights(
    module: Attention,
    x: Tensor,
    grid: tuple[int, int],
    queries: Sequence[int] | None = None,
    valid_hw: Tensor | None = None,
) -> AttentionWeights:
    """The weights of `module(x, grid, valid_hw)`, without dropout; see `attention_maps`.

    x (B, T, C), valid_hw (B, 2) in tokens.
    """
    tokens = x.shape[1]
    queries = range(tokens) if queries is None else queries
    wrong = [query for query in queries if not 0 <= query < tokens]
    if wrong:
        raise ValueError(f"there is no token {wrong[0]}: the map has {tokens}, global ones first")
    return module.attention_weights(x, grid, torch.tensor(list(queries), device=x.device), valid_hw)
