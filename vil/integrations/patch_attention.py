"""Our attentions in a vision transformer of timm's, with the weights it has.

model = timm.create_model("vit_small_patch16_224", img_size=1024, pretrained=True)
vil.patch_attention(model, window=8)                      # every block
vil.patch_attention(model, "full", blocks=[-2, -1])       # the last two as they were
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import nn

from vil.integrations.timm_attention import (
    PatchedAttention,
    PatchedGlobalOnly,
    PatchedLongformer,
    PatchGrid,
)
from vil.layers.attention import ATTENTIONS, own_arguments
from vil.utils.lookup import lookup

# what is put in; "full" is timm's own attention put back
PATCHES: dict[str, type[PatchedAttention] | None] = {
    "longformer": PatchedLongformer,
    "global": PatchedGlobalOnly,
    "full": None,
}
DEFAULTS = {"longformer": {"window": 7}}
REPLACEABLE = (Attention, AttentionRope, EvaAttention)
NEEDED = ("blocks", "patch_embed", "num_prefix_tokens")
NO_CHOICE = {"share_weights"}  # a transformer of timm's has one set of projections


def patch_attention(
    model: nn.Module,
    attention: str = "longformer",
    *,
    blocks: int | Iterable[int] | None = None,
    **own,
) -> nn.Module:
    """Replace the attentions of a timm vision transformer, in place; returns the model.

    Patch tokens are the local ones, on the grid of each forward pass; prefix tokens (class,
    distillation, registers) are global. All projections, norms, gates and drop rates stay, and with
    them the names of a state dict and every parameter.

    attention: "longformer", "global" (patch tokens see prefix tokens alone), or "full", which puts
      timm's own back. A model may be patched again.
    blocks: indices, negative ones from the end; None for all. The others stay as they are.
    own: of longformer: window=7, sw_exact=0, mode=0, mode_switch=1.0, backend="auto"; see
      `vil.build_attention`. With mode above 0 training needs `vil.layers.attention.set_progress`.

    Raises ValueError, and changes nothing, for a model that cannot be patched, and for an unknown
    name, argument, block or value.
    """
    kind = lookup(PATCHES, attention, "attention to patch in")
    own = DEFAULTS.get(attention, {}) | own
    check_arguments(attention, own)
    check_model(model)
    places = list(attentions(model, blocks))
    grid = current_grid(model) or PatchGrid(tuple(model.patch_embed.grid_size))
    put = []
    for parent, name, module in places:
        plain = module.plain() if isinstance(module, PatchedAttention) else module
        new = kind(plain, model.num_prefix_tokens, grid, **own) if kind else plain
        put.append((parent, name, new))
    for place in put:
        setattr(*place)
    if any(isinstance(module, PatchedAttention) for module in model.modules()):
        grid.attach(model.patch_embed)
    else:
        grid.detach()
    return model


def check_arguments(attention: str, own: Mapping[str, object]) -> None:
    """Raises ValueError for an argument that the attention does not have, or a bad window."""
    if attention == "full" and own:
        raise ValueError(f"full attention is timm's own and takes no {', '.join(own)}")
    allowed = own_arguments(ATTENTIONS.load(attention))
    allowed = {name: p for name, p in allowed.items() if name not in NO_CHOICE}
    for name in own:
        lookup(allowed, name, f"argument of {attention} attention in a patched model")
    window = own.get("window", 1)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window must be a whole number from 1 on, got {window!r}")


def check_model(model: nn.Module) -> None:
    """Raises ValueError with what it lacks, if a model is no vision transformer on a grid."""
    kind = type(model).__name__
    wanted = f"wanted: a vision transformer of timm's (with {', '.join(NEEDED)})"
    if not isinstance(model, nn.Module):
        raise ValueError(f"cannot patch {model!r}, which is no module; {wanted}")
    if missing := [name for name in NEEDED if not hasattr(model, name)]:
        hint = inner_transformer(model) or foreign_attention(model)
        raise ValueError(f"cannot patch {kind}: it has no {', '.join(missing)}{hint}; {wanted}")
    if getattr(model.patch_embed, "grid_size", None) is None:
        raise ValueError(f"cannot patch {kind}: its patch_embed has no grid_size; {wanted}")
    if getattr(getattr(model, "patch_drop", None), "prob", 0):
        rate = model.patch_drop.prob
        raise ValueError(
            f"cannot patch {kind}: patch_drop_rate {rate:g} leaves no grid of patch tokens; build "
            "it with patch_drop_rate=0"
        )


def inner_transformer(model: nn.Module) -> str:
    """Where in a model is one that could be patched, in words; empty for nowhere."""
    for name, part in model.named_modules():
        if all(hasattr(part, needed) for needed in NEEDED):
            return f"; its {name} ({type(part).__name__}) has: patch that"
    return ""


def foreign_attention(module: nn.Module, prefix: str = "") -> str:
    """The first attention in its blocks that cannot be replaced, in words; empty for none."""
    for name, part in module.named_modules(prefix=prefix):
        known = type(part) in REPLACEABLE or isinstance(part, PatchedAttention)
        if "blocks" in name and "Attention" in type(part).__name__ and not known:
            return f"; its {name} is {dotted(type(part))}"
    return ""


def dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def attentions(
    model: nn.Module, blocks: int | Iterable[int] | None
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The attentions of the blocks: parent, name in it, module."""
    for number in numbers(blocks, len(model.blocks)):
        block = model.blocks[number]
        found = [
            (parent, name, module)
            for parent in block.modules()
            for name, module in parent.named_children()
            if type(module) in REPLACEABLE or isinstance(module, PatchedAttention)
        ]
        if not found:
            place, names = f"blocks.{number}", ", ".join(map(dotted, REPLACEABLE))
            raise ValueError(
                f"cannot patch {type(model).__name__}: {place} ({type(block).__name__}) holds none "
                f"of {names}{foreign_attention(block, place)}"
            )
        yield from found


def numbers(blocks: int | Iterable[int] | None, count: int) -> list[int]:
    """Indices from 0 on, each once."""
    if blocks is None:
        return list(range(count))
    asked = [blocks] if isinstance(blocks, int) else list(blocks)
    for number in asked:
        if not isinstance(number, int) or not -count <= number < count:
            names = f"0..{count - 1}, or -{count}..-1"
            raise ValueError(f"no block {number!r}, the model has {count}: {names}")
    return sorted({number % count for number in asked})


def current_grid(model: nn.Module) -> PatchGrid | None:
    """That of the attentions put in before."""
    put = (module for module in model.modules() if isinstance(module, PatchedAttention))
    return next((module.grid for module in put), None)
