"""A stage of MsViT: a patch embedding followed by transformer blocks.

Shapes: B batch, c input channels, H W input size, X Y grid, L = X*Y local tokens, G global tokens,
d width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vil.layers.attention import ATTENTIONS, build_attention
from vil.layers.block import Block
from vil.layers.padding import downsample_valid, zero_padding
from vil.layers.patch_embed import PatchEmbed
from vil.layers.pos_embed import AbsoluteEmbedding
from vil.models.arch import StageSpec


class Stage(nn.Module):
    """A patch embedding and its blocks. grad_checkpoint: recompute each block in backward."""

    def __init__(
        self, embed: PatchEmbed, blocks: Sequence[Block], *, grad_checkpoint: bool
    ) -> None:
        super().__init__()
        self.embed, self.blocks = embed, nn.ModuleList(blocks)
        self.grad_checkpoint = grad_checkpoint

    def forward(
        self, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, tuple[int, int], Tensor | None]:
        """x (B, c, H, W), valid (B, 2) in pixels -> tokens (B, G+L, d), grid, valid in tokens."""
        tokens, grid = self.embed(x)
        if valid is not None:
            limit = torch.tensor(grid, device=valid.device)
            valid = downsample_valid(valid, self.embed.patch).clamp(max=limit)
        for block in self.blocks:
            if self.grad_checkpoint and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, grid, valid, use_reentrant=False)
            else:
                tokens = block(tokens, grid, valid)
        return tokens, grid, valid


def build_stage(
    spec: StageSpec,
    in_chans: int,
    grid: tuple[int, int],
    *,
    drop_path_rates: Sequence[float],
    qkv_bias: bool,
    drop_rate: float,
    attn_drop_rate: float,
    norm_embed: bool,
    norm_eps: float,
    pos_resize: str,
    attention_args: Mapping[str, Mapping] | None,
    grad_checkpoint: bool,
) -> Stage:
    """Build one stage whose position parameters are made for `grid`. See MsViT for the rest."""
    position = None
    if spec.absolute:
        position = AbsoluteEmbedding(spec.dim, grid, spec.num_global, resize=pos_resize)
    embed = PatchEmbed(
        in_chans,
        spec.dim,
        spec.patch,
        num_global=spec.num_global,
        position=position,
        norm_eps=norm_eps if norm_embed else None,
        drop=drop_rate,
    )
    common = dict(
        dim=spec.dim,
        num_heads=spec.num_heads,
        num_global=spec.num_global,
        grid=grid,
        rel_pos=not spec.absolute,
        qkv_bias=qkv_bias,
        attn_drop=attn_drop_rate,
        proj_drop=drop_rate,
    )
    blocks = [
        Block(
            build_attention(name, **common, **_attention_args(name, spec, attention_args)),
            drop=drop_rate,
            drop_path=rate,
            norm_eps=norm_eps,
        )
        for name, rate in zip(spec.attention, drop_path_rates)
    ]
    return Stage(embed, blocks, grad_checkpoint=grad_checkpoint)


def _attention_args(
    name: str, spec: StageSpec, attention_args: Mapping[str, Mapping] | None
) -> dict[str, Any]:
    """The stage's size under the attention's name for it, then the caller's arguments."""
    argument = ATTENTIONS.entry(name).facts.get("feature")
    size = {argument: spec.attn_size} if argument else {}
    return size | dict((attention_args or {}).get(name, {}))


def to_map(
    tokens: Tensor, num_global: int, grid: tuple[int, int], valid: Tensor | None = None
) -> Tensor:
    """tokens (B, G+L, d) -> local tokens as a map (B, d, X, Y), 0 in the padding."""
    return zero_padding(tokens[:, num_global:].mT.unflatten(2, grid), valid)
