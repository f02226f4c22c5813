"""Raise errors for models, outputs and images that cannot be streamed, before any work is done.

An error message gives the name of the module, as in `model.named_modules()`, and the reason.
"""

from collections.abc import Sequence

from timm.layers import DropPath
from torch import nn

from vil.layers.attention import ATTENTIONS
from vil.layers.attention.base import GlobalLocalAttention
from vil.layers.attention.full import FullAttention
from vil.layers.attention.global_only import GlobalOnlyAttention
from vil.layers.attention.longformer import LongformerAttention
from vil.models.stage import Stage
from vil.models.vision_longformer import MsViT
from vil.utils.errors import ConfigError
from vil.utils.lookup import lookup

STAGE = "stages."  # start of the name of an output that is the map of a stage
LOCAL = (LongformerAttention, GlobalOnlyAttention)
MAX_FULL_MACS = 2**45  # of full attention in a stage; about ten minutes of a CPU with 16 cores
# Layers that process each token independently.
PER_TOKEN = (
    nn.Identity,
    nn.Linear,
    nn.LayerNorm,
    nn.Dropout,
    nn.GELU,
    nn.ReLU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
)


def find_network(model: nn.Module) -> MsViT:
    """Return the model if it is an MsViT. Raises ConfigError otherwise."""
    if isinstance(model, MsViT):
        return model
    inside = [name for name, module in model.named_modules() if isinstance(module, MsViT)]
    hint = ""
    if inside:
        hint = f": stream its module {inside[0]!r} instead"
    elif any(isinstance(module, GlobalLocalAttention) for module in model.modules()):
        hint = (
            ". Streaming a vision transformer of timm would save little, because its only grid is "
            "coarse, and small beside the image: compute the whole image instead"
        )
    raise ConfigError(
        f"{type(model).__name__} cannot be streamed, because it is not a "
        f"vil.models.vision_longformer.MsViT{hint}"
    )


def check_outputs(model: MsViT, outputs: Sequence[str], own: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the output names as a tuple without duplicates, and without those in `own`, which the
    caller computes. Raises ConfigError for an unknown name or an empty sequence."""
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    known = (*own, "logits", "pooled", *(f"{STAGE}{i}" for i in range(len(model.stages))))
    if not outputs:
        raise ConfigError(f"`outputs` is empty: name at least one of {', '.join(known)}")
    try:
        for name in outputs:
            lookup(dict.fromkeys(known), name, "output")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tuple(name for name in dict.fromkeys(outputs) if name not in own)


def needs_head(outputs: Sequence[str]) -> bool:
    """Return whether any of the outputs needs the final norm and the pooling."""
    return "logits" in outputs or "pooled" in outputs


def stage_of(output: str) -> int | None:
    """Return the index of the stage whose map is the output "stages.<index>"; None for others."""
    return int(output.removeprefix(STAGE)) if output.startswith(STAGE) else None


def count_stages(model: MsViT, outputs: Sequence[str]) -> int:
    """Return the number of stages that must run to compute the outputs."""
    if needs_head(outputs):
        return len(model.stages)
    return 1 + max(stage_of(name) for name in outputs)


def check_model(
    model: MsViT, outputs: Sequence[str], size: tuple[int, int], *, pad: bool = False
) -> None:
    """Raise ConfigError, with module and reason, if the model cannot stream an image of `size`.

    outputs: names of the outputs. Only the stages that must run to compute them are checked. size:
    (H, W) in pixels. pad: see `vil.streaming.prepare`.
    """
    grids = model.grids(size, pad=pad)
    for i, stage in enumerate(model.stages[: count_stages(model, outputs)]):
        name, grid = f"stages.{i}", grids[i]
        if min(grid) < 1:
            raise ConfigError(
                f"{name} has no tokens: the image of {size[0]} x {size[1]} pixels is smaller than "
                f"one token of this stage, {model.strides[i]} x {model.strides[i]} pixels"
            )
        _check_stage(stage, name, grid, padded_grid(model, i, grid) if pad else grid)
    _check_training(model)
    if needs_head(outputs):
        _check_head(model, outputs)


def _check_stage(stage: Stage, name: str, grid: tuple[int, int], padded: tuple[int, int]) -> None:
    """Raise ConfigError if a stage cannot be streamed. name: its module name. grid: (X, Y). padded:
    the same with the tokens that are entirely in the padding."""
    if stage.reversible:
        raise ConfigError(
            f"{name} cannot be streamed: its blocks are reversible, so they have two token tensors"
        )
    position = stage.embed.position
    if position is not None and position.resize == "crop":
        for line, length in zip(position.param_grid, padded):
            if length > line:
                raise ConfigError(
                    f"{name}.embed.position has {line} embeddings, too few to be cropped to "
                    f'{length}: set MODEL.VIT.POS_RESIZE (argument pos_resize) to "interpolate"'
                )
    work = 0
    for index, block in enumerate(stage.blocks):
        attn, where = block.attn, f"{name}.blocks.{index}.attn"
        if type(attn) not in (*LOCAL, FullAttention):
            raise ConfigError(f"{where} cannot be streamed: {reason_against(attn)}")
        if isinstance(attn, LongformerAttention) and grid != padded:
            window = attn.window(grid)
            if window.cyclic and window.chunks != attn.window(padded).chunks:
                raise ConfigError(
                    f"{where} cannot be streamed: its window wraps around at the border of the "
                    f"padded image; set MODEL.VIT.MSVIT.SW_EXACT to 0, or use an image whose sides "
                    "are multiples of the coarsest stride"
                )
        if isinstance(attn, FullAttention):
            work += 2 * (grid[0] * grid[1] + attn.num_global) ** 2 * attn.dim
    if work > MAX_FULL_MACS:
        raise ConfigError(
            f"{name} cannot be streamed: full attention between {grid[0] * grid[1]:,} tokens needs "
            f"{work:.1e} multiply-accumulates, more than {MAX_FULL_MACS:.1e}; use a smaller image, "
            "or make the attention of this stage local, with s1 instead of s0 in "
            "MODEL.VIT.MSVIT.ARCH"
        )


def padded_grid(model: MsViT, index: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Return the grid of stage `index` for an image that is padded to a multiple of the coarsest
    stride. grid: the grid without the tokens that are entirely in the padding."""
    step = model.strides[-1] // model.strides[index]
    return (-(-grid[0] // step) * step, -(-grid[1] // step) * step)


def reason_against(attn: nn.Module) -> str:
    """Return a text with the reason why an attention module cannot be streamed."""
    for entry in ATTENTIONS.values():
        if entry.load() is type(attn):
            return entry.facts.get("not_streamed", "vil.streaming does not implement it")
    return f"vil.streaming does not implement {type(attn).__name__}"


def _check_training(model: MsViT) -> None:
    """Raise ConfigError if the model is in training mode and its forward pass would be random."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        drops = getattr(module, "attn_drop", 0.0)
        if isinstance(module, nn.Dropout):
            drops = module.p
        elif isinstance(module, DropPath):
            drops = module.drop_prob
        if isinstance(drops, float) and drops > 0:
            raise ConfigError(f"{name} has dropout, which cannot be streamed: call model.eval()")
        if getattr(module, "mode", 0) > 0:
            raise ConfigError(f"{name} uses random shift in training mode: call model.eval()")


def _check_head(model: MsViT, outputs: Sequence[str]) -> None:
    if model.global_pool:
        return
    if model.returns_tokens:
        raise ConfigError(
            "the model cannot be streamed, because its output is not a map: its last stage has "
            "global tokens, and its global_pool is ''. Call model.set_global_pool('avg')"
        )
    if "logits" not in outputs:
        return
    for name, module in model.head.named_modules(prefix="head"):
        is_leaf = not any(True for _ in module.children())
        if is_leaf and not isinstance(module, PER_TOKEN):
            raise ConfigError(
                f"{name} cannot be streamed: {type(module).__name__} is not known to process each "
                "token independently"
            )
        if not is_leaf and not isinstance(module, nn.Sequential):
            raise ConfigError(
                f"{name} cannot be streamed: {type(module).__name__} is not an nn.Sequential"
            )
