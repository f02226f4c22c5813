"""MsViT, the multi-scale vision transformer: stages on ever coarser grids, each with fresh globals.

Letters: B images, c channels, H W image size, i stage, X Y its grid, L = X*Y, G its global tokens,
d its width.
Source: Vision Longformer, arXiv:2103.15358, section 3.
"""

import logging
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vil.layers.attention import ATTENTIONS, build_attention
from vil.layers.block import Block
from vil.layers.padding import downsample_valid, zero_padding
from vil.layers.patch_embed import PatchEmbed
from vil.layers.pos_embed import AbsoluteEmbedding
from vil.models.arch import StageSpec
from vil.utils.lookup import lookup

log = logging.getLogger(__name__)


class Stage(nn.Module):
    """A patch embedding and its blocks."""

    def __init__(
        self, embed: PatchEmbed, blocks: Sequence[Block], *, grad_checkpoint: bool
    ) -> None:
        super().__init__()
        self.embed, self.blocks = embed, nn.ModuleList(blocks)
        self.grad_checkpoint = grad_checkpoint

    def forward(
        self, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, tuple[int, int], Tensor | None]:
        """x (B, c, H, W), valid in pixels -> tokens (B, G+L, d), grid, valid in tokens."""
        tokens, grid = self.embed(x)
        if valid is not None:
            most = torch.tensor(grid, device=valid.device)
            valid = downsample_valid(valid, self.embed.patch).clamp(max=most)
        for block in self.blocks:
            if self.grad_checkpoint and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, grid, valid, use_reentrant=False)
            else:
                tokens = block(tokens, grid, valid)
        return tokens, grid, valid


class MsViT(nn.Module):
    """A classifier and a backbone over images of any size.

    img_size: the usual image side, or height and width, which position parameters are made for;
    others work too.
    num_classes: 0 for no head.
    norm_embed: a LayerNorm after each patch convolution.
    avg_pool: the head reads the mean of all tokens instead of the first global token.
    pos_resize: `interpolate` or `crop` for absolute embeddings on other grids.
    attention_args: own arguments by attention name, such as {"longformer": {"mode": 1}}; see
    `build_attention`.
    grad_checkpoint: recompute each block in the backward pass instead of keeping its activations.
    A stage that asks for a relative bias, but has an attention without one, gets the absolute
    embedding instead, and a warning: it would not know positions otherwise.
    Raises ValueError for stages that do not fit together.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        *,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_embed: bool = True,
        norm_eps: float = 1e-6,
        avg_pool: bool = False,
        pos_resize: str = "interpolate",
        attention_args: Mapping[str, Mapping] | None = None,
        grad_checkpoint: bool = False,
    ) -> None:
        # a setting is whatever has a name after `stages`
        settings = {
            key: value
            for key, value in locals().items()
            if key not in ("self", "stages", "__class__")
        }
        super().__init__()
        self.settings = settings  # as they were given, for `describe`
        self.notes: dict[str, Any] = {}  # what goes with its weights: transform, classes
        for name in attention_args or {}:
            lookup(ATTENTIONS, name, "attention")
        stages = _with_positions(stages)
        depths = [len(spec.attention) for spec in stages]
        drop_paths = torch.linspace(0, drop_path_rate, max(sum(depths), 1), device="cpu").split(
            depths
        )
        self.specs, self.avg_pool = tuple(stages), avg_pool
        self.stages, map_size = nn.ModuleList(), pair(img_size)
        for spec, rates in zip(stages, drop_paths):
            grid = (map_size[0] // spec.patch, map_size[1] // spec.patch)
            if min(grid) < 1:
                raise ValueError(
                    f"stage {len(self.stages) + 1} has no token left of a map of {min(map_size)}"
                )
            position = (
                AbsoluteEmbedding(spec.dim, grid, spec.num_global, resize=pos_resize)
                if spec.absolute
                else None
            )
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
                    build_attention(name, **common, **_own(name, spec, attention_args)),
                    drop=drop_rate,
                    drop_path=rate,
                    norm_eps=norm_eps,
                )
                for name, rate in zip(spec.attention, rates.tolist())
            ]
            self.stages.append(Stage(embed, blocks, grad_checkpoint=grad_checkpoint))
            in_chans, map_size = spec.dim, grid
        self.num_features = in_chans
        self.norm = nn.LayerNorm(in_chans, eps=norm_eps)
        self.head = nn.Linear(in_chans, num_classes) if num_classes else nn.Identity()
        self.apply(_init_linear)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, c, H, W) -> logits (B, num_classes)."""
        return self.head(self.pool(self.norm(self.last_tokens(x))))

    def forward_stages(self, x: Tensor, valid: Tensor | None = None) -> list[Tensor]:
        """The local tokens of each stage as maps, not normalised.

        x (B, c, H, W) -> (B, d_i, X_i, Y_i) each. valid (B, 2): height and width of each image's
        real pixels; tokens wholly beyond are never attended to, and are 0 in the maps.
        """
        maps = []
        for stage, spec in zip(self.stages, self.specs):
            tokens, grid, valid = stage(x, valid)
            x = zero_padding(to_map(tokens, spec.num_global, grid), valid)
            maps.append(x)
        return maps

    def last_tokens(self, x: Tensor) -> Tensor:
        """x (B, c, H, W) -> the last stage's tokens (B, G+L, d), global ones first."""
        for stage, spec in zip(self.stages, self.specs):
            tokens, grid, _ = stage(x)
            x = to_map(tokens, spec.num_global, grid)
        return tokens

    def pool(self, tokens: Tensor) -> Tensor:
        """(B, G+L, d) -> (B, d): the first global token, or the mean (none there, avg_pool)."""
        return tokens.mean(1) if self.avg_pool or not self.specs[-1].num_global else tokens[:, 0]

    def no_weight_decay(self) -> set[str]:
        """The parameters that are not decayed: norms, tokens, positions, the head's bias."""
        norms = {
            f"{name}.{leaf}"
            for name, module in self.named_modules()
            if isinstance(module, nn.LayerNorm)
            for leaf, _ in module.named_parameters(recurse=False)
        }
        kinds = ("cls_token", "pos_embed", "relative_position", "head.bias")
        return norms | {
            name for name, _ in self.named_parameters() if any(kind in name for kind in kinds)
        }

    @property
    def channels(self) -> list[int]:
        """The width of each stage's map."""
        return [spec.dim for spec in self.specs]

    @property
    def strides(self) -> list[int]:
        """The pixels of an image's side that a cell of each stage's map stands for."""
        return list(accumulate((spec.patch for spec in self.specs), operator.mul))

    @property
    def num_layers(self) -> int:
        """The largest depth that `layer_of` gives: the number of blocks, and one."""
        return sum(len(stage.blocks) for stage in self.stages) + 1

    def layer_of(self, name: str) -> int:
        """The depth of a parameter, for learning rates that decay with it.

        0 is the embedding of stage 1; then come the blocks of all stages in order from 1 on, and
        the final norm and head. A later embedding counts with the first block of its stage, or
        with the last block before it if the stage has none. Raises ValueError for other names.
        """
        if name.startswith(("norm.", "head.")):
            return self.num_layers
        match = re.match(r"stages\.(\d+)\.(?:embed|blocks\.(\d+))\.", name)
        if not match or int(match[1]) >= len(self.stages):
            raise ValueError(f"{name!r} is no parameter of this model")
        stage = int(match[1])
        before = sum(len(earlier.blocks) for earlier in self.stages[:stage])
        if match[2] is not None:
            return before + int(match[2]) + 1
        return before + 1 if stage and len(self.stages[stage].blocks) else before

    def freeze_stages(self, count: int) -> None:
        """Train the first `count` stages no further. Raises ValueError for more than there are."""
        if not 0 <= count <= len(self.stages):
            raise ValueError(f"cannot freeze {count} of {len(self.stages)} stages")
        for stage in self.stages[:count]:
            stage.requires_grad_(False)

    def resize_positions(self, img_size: int | tuple[int, int], rule: str = "linear") -> None:
        """Make the position parameters for another image size, for good, by one of RULES."""
        self.settings["img_size"] = img_size
        for stage, grid in zip(self.stages, self.grids(pair(img_size))):
            if stage.embed.position is not None:
                stage.embed.position.set_grid(grid, rule)
            for block in stage.blocks:
                block.attn.set_grid(grid, rule)

    def grids(self, img_size: tuple[int, int]) -> list[tuple[int, int]]:
        """Rows and columns of each stage's tokens, for images of that size."""
        found = []
        for stage in self.stages:
            img_size = tuple(n // stage.embed.patch for n in img_size)
            found.append(img_size)
        return found

    def macs(self, img_size: tuple[int, int]) -> list[int]:
        """Multiply-accumulates of one image of that size: per stage, and the head's last."""
        counts = [
            stage.embed.macs(grid) + sum(block.macs(grid) for block in stage.blocks)
            for stage, grid in zip(self.stages, self.grids(img_size))
        ]
        return [*counts, self.head.weight.numel() if isinstance(self.head, nn.Linear) else 0]


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width of a size, or of a square's side."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _with_positions(stages: Sequence[StageSpec]) -> list[StageSpec]:
    """The stages, with absolute embeddings where an attention has no relative bias."""
    found, changed = [], []
    for number, spec in enumerate(stages, start=1):
        kinds = {name: ATTENTIONS.load(name) for name in spec.attention}
        without = [name for name, kind in kinds.items() if not kind.has_relative_bias]
        if without and not spec.absolute:
            changed.append(f"stage {number} ({', '.join(without)})")
            spec = replace(spec, absolute=True)
        found.append(spec)
    if changed:
        log.warning(
            "no relative bias in the attention of %s: the absolute embedding is used there",
            ", ".join(changed),
        )
    return found


def _own(name: str, spec: StageSpec, attention_args: Mapping[str, Mapping] | None) -> dict:
    """A stage's own attention arguments: the letter f under its name, and the caller's."""
    argument = ATTENTIONS.entry(name).facts.get("feature")
    feature = {argument: spec.feature} if argument else {}
    return feature | dict((attention_args or {}).get(name, {}))


def to_map(tokens: Tensor, num_global: int, grid: tuple[int, int]) -> Tensor:
    """(B, G+L, d) -> (B, d, X, Y), global tokens dropped."""
    return tokens[:, num_global:].mT.unflatten(2, grid)


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and not module.weight.is_meta:
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
