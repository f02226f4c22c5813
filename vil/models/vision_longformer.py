"""MsViT, the multi-scale vision transformer, with stages on successively coarser grids.

Each stage has a separate patch embedding, global tokens and attention. The model is a classifier
and a backbone, with the methods and attributes of timm's models.

Shapes: B batch, c input channels, H W image size, K classes; for stage i: X_i Y_i grid, L = X_i*Y_i
local tokens, G global tokens, d_i width. X, Y and d are those of the last stage.
Source: Vision Longformer, arXiv:2103.15358, section 3.
"""

import logging
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple, trunc_normal_
from torch import Tensor, nn

from vil.layers.attention import ATTENTIONS
from vil.layers.padding import zero_padding
from vil.models.arch import StageSpec, split_by_block
from vil.models.stage import Stage, to_map
from vil.utils.lookup import lookup

log = logging.getLogger(__name__)
TOKEN_POOLS = ("avg", "token", "")
MAP_POOLS = ("avg", "max", "avgmax", "")


class MsViT(nn.Module):
    """Multi-scale vision transformer: a classifier and a backbone for images of any size.

    stages: settings of the stages, for example from `parse_arch`.
    img_size: image side, or (height, width), in pixels, for which position embeddings and bias
      tables are created. The forward pass resizes them for images of other sizes.
    num_classes: 0 for no head.
    norm_embed: apply LayerNorm after each patch convolution.
    avg_pool: classify from the mean of all tokens instead of the first global token.
    pos_resize: "interpolate" or "crop" absolute position embeddings for images of other sizes.
    attention_args: {attention name: keyword arguments of `build_attention`}, such as {"longformer":
      {"mode": 1}}. Some arguments, such as an attention pattern, can be text with values for
      different stages and blocks, see `vil.models.arch.split_by_block`.
    grad_checkpoint: recompute each block in backward instead of storing its activations.
    reversible: use reversible blocks, whose activations are recomputed in backward. Their outputs
      differ from those of ordinary blocks, see `vil.layers.reversible`. grad_checkpoint is then
      ignored, with a warning.

    If an attention class does not support the relative position bias that a stage requests, the
    stage uses an absolute position embedding, with a warning. Raises ValueError if a stage has no
    tokens at img_size, or if an argument is invalid.
    """

    stages: Sequence[Stage]  # an nn.ModuleList
    norm: nn.Module  # nn.LayerNorm; nn.Identity in a pruned model
    decays_biases = True  # weight decay excludes only what `no_weight_decay` names

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
        reversible: bool = False,
    ) -> None:
        settings = {k: v for k, v in locals().items() if k not in ("self", "stages", "__class__")}
        super().__init__()
        self.settings = settings  # keyword arguments as given; saved in the model card
        self.notes: dict[str, Any] = {}  # input transform and class names of the loaded weights
        stages = _with_positions(stages)
        depths = [len(spec.attention) for spec in stages]
        rates = torch.linspace(0, drop_path_rate, max(sum(depths), 1), device="cpu").split(depths)
        self.specs = tuple(stages)
        self.num_classes, self.in_chans = num_classes, in_chans
        built, map_size = [], to_2tuple(img_size)
        arguments = arguments_by_block(stages, attention_args or {})
        for spec, stage_rates, chosen in zip(stages, rates, arguments):
            grid = (map_size[0] // spec.patch, map_size[1] // spec.patch)
            if min(grid) < 1:
                raise ValueError(
                    f"stage {len(built) + 1} has no tokens, because its input {map_size} is "
                    f"smaller than its patches of side {spec.patch}: use a larger image size"
                )
            built.append(Stage(spec, in_chans, grid, stage_rates.tolist(), chosen, settings))
            in_chans, map_size = spec.dim, grid
        self.stages = cast(Sequence[Stage], nn.ModuleList(built))
        self.num_features = self.head_hidden_size = in_chans
        self.norm = nn.LayerNorm(in_chans, eps=norm_eps)
        self.head = nn.Linear(in_chans, num_classes) if num_classes else nn.Identity()
        self.returns_tokens = self.specs[-1].num_global > 0  # features are tokens, else a map
        self.global_pool = "token" if self.returns_tokens and not avg_pool else "avg"
        self.feature_info = [
            {"num_chs": channels, "reduction": stride, "module": f"stages.{i}"}
            for i, (channels, stride) in enumerate(zip(self.channels, self.strides))
        ]
        self.apply(_init_linear)
        self.set_grad_checkpointing(grad_checkpoint)

    # Classifier

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, c, H, W) to logits (B, K)."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Map x (B, c, H, W) to the features of the last stage after the final norm.

        They are tokens (B, G+L, d), with the global tokens first, or a map (B, d, X, Y) if G is 0.
        """
        return self.forward_intermediates(x, indices=1)[0]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map the output of `forward_features` to logits (B, K).

        pre_logits: return the pooled features (B, d) instead of logits.
        """
        x = self.pool(x)
        if pre_logits:
            return x
        return self.head(x.movedim(1, -1)).movedim(-1, 1) if x.ndim == 4 else self.head(x)

    def pool(self, x: Tensor) -> Tensor:
        """Pool features x, a map (B, d, X, Y) or tokens (B, G+L, d), to (B, d).

        The attribute `global_pool` selects the pooling. "avg": mean. "token" (tokens only): first
        token. "max" (maps only): maximum. "avgmax" (maps only): (mean + max) / 2. "": no pooling.
        """
        if not self.global_pool:
            return x
        tokens = x.flatten(2).mT if x.ndim == 4 else x
        match self.global_pool:
            case "token":
                return tokens[:, 0]
            case "max":
                return tokens.amax(1)
            case "avgmax":
                return 0.5 * (tokens.mean(1) + tokens.amax(1))
        return tokens.mean(1)

    def get_classifier(self) -> nn.Module:
        """Return the classification head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head with a new one for `num_classes` classes. If this is 0, remove the head.

        Also removes the class names of the old head, which the attribute `notes` stores.
        global_pool: pooling, see `pool`; None keeps it. Raises ValueError if it is not supported.
        """
        p = next(self.parameters())
        self.num_classes, self.head = num_classes, nn.Identity()
        self.notes.pop("classes", None)
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes, device=p.device, dtype=p.dtype)
            _init_linear(self.head)
        self.head.train(self.training)
        if global_pool is not None:
            self.set_global_pool(global_pool)

    def set_global_pool(self, global_pool: str) -> None:
        """Select the pooling (see `pool`). Raises ValueError if the model does not support it."""
        pools = TOKEN_POOLS if self.returns_tokens else MAP_POOLS
        if global_pool not in pools:
            choices = ", ".join(map(repr, pools))
            raise ValueError(f"global_pool must be one of {choices}, got {global_pool!r}")
        self.global_pool = global_pool
        if self.returns_tokens:
            self.settings["avg_pool"] = global_pool == "avg"

    # Backbone

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        *,
        valid: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Map x (B, c, H, W) to (features, list of the output maps of selected stages).

        The features are the output of `forward_features`. The map of stage i is (B, d_i, X_i, Y_i).

        indices: selected stages, from 0, in the order of the returned maps. Negative indices count
          from the end. An int n selects the last n stages, None selects all.
        norm: apply the final norm to the last stage's map.
        stop_early: stop after the last selected stage, and return its map as the features.
        output_fmt: layout of the maps, NCHW or NHWC.
        intermediates_only: return only the list of maps.
        valid (B, 2): height and width of each image without its padding. Tokens entirely in the
          padding are never attended to, and are 0 in the maps. So that an image has the same maps
          in any batch, padding is set to 0 and extended to multiples of the largest stride.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        chosen, last = self._select_stages(indices)
        count = last + 1 if stop_early else len(self.stages)
        maps: dict[int, Tensor] = {}
        tokens, grid = x, (0, 0)
        if valid is not None:
            down, right = (-size % self.strides[-1] for size in x.shape[-2:])
            x = F.pad(zero_padding(x, valid), (0, right, 0, down))
        for i, (stage, spec) in enumerate(zip(self.stages[:count], self.specs)):
            tokens, grid, valid = stage(x, valid)
            x = to_map(tokens, spec.num_global, grid, valid)
            if i in chosen:
                is_normed = norm and i == len(self.stages) - 1
                x_i = to_map(self.norm(tokens), spec.num_global, grid, valid) if is_normed else x
                maps[i] = x_i.permute(0, 2, 3, 1) if output_fmt == "NHWC" else x_i
        intermediates = [maps[i] for i in chosen]
        if intermediates_only:
            return intermediates
        if count < len(self.stages):
            return x, intermediates
        tokens = self.norm(tokens)
        if self.returns_tokens:
            return tokens, intermediates
        return to_map(tokens, spec.num_global, grid, valid), intermediates

    def _select_stages(self, indices: int | Sequence[int] | None) -> tuple[list[int], int]:
        """Return (list of the selected stages' indices from 0, the largest of these indices).

        indices: see `forward_intermediates`. Raises ValueError if a stage does not exist.
        """
        count = len(self.stages)
        if indices is None:
            indices = count
        if isinstance(indices, int):
            if not 0 < indices <= count:
                raise ValueError(f"an integer `indices` must be from 1 to {count}, got {indices}")
            indices = range(count - indices, count)
        chosen = [i + count if i < 0 else i for i in indices]
        if not chosen or min(chosen) < 0 or max(chosen) >= count:
            allowed = f"one or more stages from 0 to {count - 1} (or from {-count} to -1)"
            raise ValueError(f"`indices` must be {allowed}, got {list(indices)}")
        return chosen, max(chosen)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last selected stage. Returns the selected stages' indices.

        indices: see `forward_intermediates`. prune_norm: remove the final norm. prune_head: remove
        the head. If any stage is removed, the norm and the head are always removed too.
        """
        chosen, last = self._select_stages(indices)
        has_unused = last < len(self.stages) - 1
        if has_unused:
            self.stages, self.specs = self.stages[: last + 1], self.specs[: last + 1]
            self.num_features = self.head_hidden_size = self.specs[-1].dim
            self.returns_tokens = False
        if has_unused or prune_norm:
            self.norm = nn.Identity()
        if has_unused or prune_head:
            self.reset_classifier(0, "")
        return chosen

    @property
    def channels(self) -> list[int]:
        """Number of channels d_i of each stage."""
        return [spec.dim for spec in self.specs]

    @property
    def strides(self) -> list[int]:
        """Stride of each stage's tokens, in image pixels."""
        return list(accumulate((spec.patch for spec in self.specs), operator.mul))

    # Training

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable or disable gradient checkpointing, which recomputes each block in backward.

        A reversible model always recomputes its blocks, so enabling only logs a warning.
        """
        if enable and self.settings["reversible"]:
            log.warning(
                "gradient checkpointing is ignored: reversible blocks are always recomputed"
            )
            return
        for stage in self.stages:
            stage.grad_checkpoint = enable

    def freeze_stages(self, count: int) -> None:
        """Freeze the first `count` stages. Raises ValueError if the model has fewer stages."""
        if not 0 <= count <= len(self.stages):
            raise ValueError(f"cannot freeze {count} stages: the model has {len(self.stages)}")
        for stage in self.stages[:count]:
            stage.requires_grad_(False)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters to exclude from weight decay.

        These are norm parameters, global tokens, position embeddings, bias tables and head.bias.
        """
        kinds = ("cls_token", "pos_embed", "relative_position", "head.bias")
        return {
            name
            for name, _ in self.named_parameters()
            if any(kind in name for kind in kinds)
            or isinstance(self.get_submodule(name.rpartition(".")[0]), nn.LayerNorm)
        }

    def group_matcher(self, coarse: bool = False) -> dict:
        """Return the regular expressions by which timm groups parameters into layers.

        coarse: one layer per stage. By default, the layers are those of `layer_of`, except that the
        final norm and the head are in the layer of the last block, as in timm's models.
        """
        fine = [
            (r"^stages\.(\d+)\.embed", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm|^head", (99999,)),
        ]
        return {"stem": r"^stages\.0\.embed", "blocks": r"^stages\.(\d+)" if coarse else fine}

    @property
    def num_layers(self) -> int:
        """Largest layer index that `layer_of` returns: the number of blocks plus one."""
        return sum(len(stage.blocks) for stage in self.stages) + 1

    def layer_of(self, name: str) -> int:
        """Return the layer index of the parameter `name`, for layer-wise learning rate decay.

        Layer 0 is the patch embedding of the first stage, each block is one layer, and the last
        layer is the final norm and the head. Any other patch embedding is in the layer of the first
        block of its stage. Raises ValueError for a name that is not a parameter of the model.
        """
        if name.startswith(("norm.", "head.")):
            return self.num_layers
        match = re.match(r"stages\.(\d+)\.(?:embed|blocks\.(\d+))\.", name)
        if not match or int(match[1]) >= len(self.stages):
            raise ValueError(f"{name!r} is not a parameter of this model")
        stage = int(match[1])
        before = sum(len(earlier.blocks) for earlier in self.stages[:stage])
        if match[2] is not None:
            return before + int(match[2]) + 1
        # a later stage without blocks: the layer of the previous block
        return before + 1 if stage and len(self.stages[stage].blocks) else before

    # Image size and cost

    def set_input_size(self, img_size: int | tuple[int, int], rule: str = "linear") -> None:
        """Resize the position embeddings and bias tables for another image size.

        img_size: image side, or (height, width), in pixels. rule: "linear", "bicubic" or "extend",
        see `vil.layers.pos_embed.resize_table`. Raises ValueError if the image is too small.
        """
        grids = self.grids(to_2tuple(img_size))
        if min(map(min, grids)) < 1:
            raise ValueError(f"image sides need {self.strides[-1]} pixels or more, got {img_size}")
        self.settings["img_size"] = img_size
        for stage, grid in zip(self.stages, grids):
            if stage.embed.position is not None:
                stage.embed.position.set_grid(grid, rule)
            for block in stage.blocks:
                block.attn.set_grid(grid, rule)

    def grids(self, img_size: tuple[int, int], *, pad: bool = False) -> list[tuple[int, int]]:
        """Return each stage's grid (rows, columns) of tokens for an image of (height, width).

        pad: count the tokens that are partly in the padding of an image, as for the `valid` of
        `forward_intermediates`.
        """
        (height, width), sign = img_size, -1 if pad else 1  # -1 rounds up
        return [(sign * (sign * height // s), sign * (sign * width // s)) for s in self.strides]

    def macs(self, img_size: tuple[int, int]) -> list[int]:
        """Count the multiply-accumulates of each stage, and then of the head, for one image.

        img_size: (height, width) of the image in pixels.
        """
        counts = [
            stage.embed.macs(grid) + sum(block.macs(grid) for block in stage.blocks)
            for stage, grid in zip(self.stages, self.grids(img_size))
        ]
        return [*counts, self.head.weight.numel() if isinstance(self.head, nn.Linear) else 0]


def arguments_by_block(
    stages: Sequence[StageSpec], arguments: Mapping[str, Mapping[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Return the attention arguments of each block, in a list per stage.

    arguments: {attention name: {argument: value}}. A string for an argument that can differ by
    block, such as an attention pattern, is split by `split_by_block`. Raises ValueError for an
    unknown attention name, and for values for too many stages or blocks.
    """
    result = [[dict(arguments.get(name, {})) for name in spec.attention] for spec in stages]
    for name, settings in arguments.items():
        counts = [spec.attention.count(name) for spec in stages]
        for key in lookup(ATTENTIONS, name, "attention").facts.get("by_block", ()):
            if not isinstance(settings.get(key), str) or not any(counts):
                continue
            for stage, spec, texts in zip(result, stages, split_by_block(settings[key], counts)):
                blocks = [block for block, used in zip(stage, spec.attention) if used == name]
                for block, text in zip(blocks, texts):
                    block[key] = text
    return result


def _with_positions(stages: Sequence[StageSpec]) -> list[StageSpec]:
    """Replace relative position bias by absolute position embeddings where it is not supported.

    Returns the new list of stages. Logs a warning if any stage is changed.
    """
    result, changed = [], []
    for number, spec in enumerate(stages, start=1):
        names = dict.fromkeys(spec.attention)
        without = [name for name in names if not ATTENTIONS.load(name).has_relative_bias]
        if without and not spec.absolute:
            changed.append(f"stage {number} ({', '.join(without)})")
            spec = replace(spec, absolute=True)
        result.append(spec)
    if changed:
        log.warning(
            "the attention of %s does not support a relative position bias: an absolute position "
            "embedding is used instead",
            ", ".join(changed),
        )
    return result


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and not module.weight.is_meta:
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
