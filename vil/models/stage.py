"""A stage of MsViT: a patch embedding followed by transformer blocks.

Shapes: B batch, c input channels, H W input size, X Y grid, L = X*Y local tokens, G global tokens,
d width.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vil.layers.attention import ATTENTIONS, build_attention
from vil.layers.block import Block
from vil.layers.padding import downsample_valid, zero_padding
from vil.layers.patch_embed import PatchEmbed
from vil.layers.pos_embed import AbsoluteEmbedding
from vil.layers.reversible import run_reversible
from vil.models.arch import StageSpec


class Stage(nn.Module):
    """One stage of MsViT: a patch embedding, then transformer blocks.

    spec: dimensions and attention of the stage. grid: (rows, columns) of local tokens, for which
    the position embedding and bias tables are created. drop_path_rates: stochastic depth rate of
    each block. arguments: additional arguments of each block's attention class. settings: all
    keyword arguments of MsViT.
    """

    blocks: Sequence[Block]  # an nn.ModuleList

    def __init__(
        self,
        spec: StageSpec,
        in_chans: int,
        grid: tuple[int, int],
        drop_path_rates: Sequence[float],
        arguments: Sequence[dict[str, Any]],
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__()
        drop, norm_eps, num_global = settings["drop_rate"], settings["norm_eps"], spec.num_global
        position, resize = None, settings["pos_resize"]
        if spec.absolute:
            position = AbsoluteEmbedding(spec.dim, grid, num_global, resize=resize)
        self.embed = PatchEmbed(
            in_chans,
            spec.dim,
            spec.patch,
            num_global=num_global,
            position=position,
            norm_eps=norm_eps if settings["norm_embed"] else None,
            drop=drop,
        )
        common = dict(
            dim=spec.dim,
            num_heads=spec.num_heads,
            num_global=num_global,
            grid=grid,
            rel_pos=not spec.absolute,
            qkv_bias=settings["qkv_bias"],
            attn_drop=settings["attn_drop_rate"],
            proj_drop=drop,
        )
        blocks = []
        for name, rate, chosen in zip(spec.attention, drop_path_rates, arguments):
            argument = ATTENTIONS.entry(name).facts.get("feature")  # argument for attn_size
            sized = {argument: spec.attn_size} if argument else {}
            attn = build_attention(name, **common, **(sized | chosen))
            blocks.append(Block(attn, drop=drop, drop_path=rate, norm_eps=norm_eps))
        self.blocks = cast(Sequence[Block], nn.ModuleList(blocks))
        self.grad_checkpoint = settings["grad_checkpoint"]  # recompute each block in backward
        self.reversible = settings["reversible"]
        self.stores_activations = False  # see `store_activations`

    def forward(
        self, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, tuple[int, int], Tensor | None]:
        """Map x (B, c, H, W) to the tokens (B, G+L, d), their grid (X, Y), and valid_hw.

        valid (B, 2): unpadded rows and columns of each image in x; None if no image is padded.
        valid_hw (B, 2): the same, in tokens.
        """
        tokens, grid = self.embed(x)
        if valid is not None:
            valid = downsample_valid(valid, self.embed.patch, limit=grid)
        if self.reversible:
            recompute = not self.stores_activations
            tokens = run_reversible(self.blocks, tokens, grid, valid, recompute=recompute)
            return tokens, grid, valid
        for block in self.blocks:
            if self.grad_checkpoint and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, grid, valid, use_reentrant=False)
            else:
                tokens = block(tokens, grid, valid)
        return tokens, grid, valid

    def extra_repr(self) -> str:
        return "reversible=True" if self.reversible else ""


@contextmanager
def store_activations(model: nn.Module) -> Iterator[None]:
    """Make a model's reversible stages store their activations in a `with` block.

    In the block, autograd can compute second derivatives, and the gradients of intermediate
    tensors, such as the tensors that a forward hook receives. A forward pass needs as much memory
    as in a model that is not reversible.
    """
    stages = [module for module in model.modules() if isinstance(module, Stage)]
    before = [stage.stores_activations for stage in stages]
    try:
        for stage in stages:
            stage.stores_activations = True
        yield
    finally:
        for stage, value in zip(stages, before):
            stage.stores_activations = value


def to_map(
    tokens: Tensor, num_global: int, grid: tuple[int, int], valid: Tensor | None = None
) -> Tensor:
    """Drop the global tokens from tokens (B, G+L, d), and reshape the others to a map (B, d, X, Y).

    num_global: G. grid: (X, Y). valid (B, 2): unpadded rows and columns of each image's tokens. The
    map is 0 in the padding.
    """
    return zero_padding(tokens[:, num_global:].mT.unflatten(2, grid), valid)
