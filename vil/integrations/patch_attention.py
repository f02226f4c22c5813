"""Replace the attention of a timm vision transformer by vil's, keeping its weights.

model = timm.create_model("vit_small_patch16_224", img_size=1024, pretrained=True)
vil.patch_attention(model, window=8)                      # every block
vil.patch_attention(model, pattern="axial | local:3")     # a pattern instead of a window
vil.patch_attention(model, "full", blocks=[-2, -1])       # restore the last two
"""

from collections.abc import Iterable, Iterator, Mapping

from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import nn

from vil.integrations.timm_attention import (
    PatchedAttention,
    PatchedGlobalOnly,
    PatchedLongformer,
    PatchedPattern,
    PatchGrid,
)
from vil.layers.attention import ATTENTIONS, own_arguments
from vil.layers.attention.base import GlobalLocalAttention
from vil.utils.lookup import lookup

PATCHES: dict[str, type[PatchedAttention]] = {
    "longformer": PatchedLongformer,
    "pattern": PatchedPattern,
    "global": PatchedGlobalOnly,
}
RESTORE = "full"  # the name for timm's own attention
DEFAULTS = {"longformer": {"window": 7}}
REPLACEABLE = (Attention, AttentionRope, EvaAttention)
WHAT = "attention to patch in"
REQUIRED = ("blocks", "patch_embed", "num_prefix_tokens")
# timm's attention has one set of projections, and its own relative position bias
FIXED = {"share_weights", "max_reach"}


def patch_attention(
    model: nn.Module,
    attention: str | None = None,
    *,
    blocks: int | Iterable[int] | None = None,
    **kwargs,
) -> nn.Module:
    """Replace the attentions of a timm vision transformer by `attention`, in place.

    Returns the model.

    Patch tokens become local tokens on the grid of each forward pass, and prefix tokens (class,
    distillation, registers) become global tokens. Projections, norms, gates and drop rates are
    kept, so parameters and state dict names do not change. A model can be patched more than once.

    attention: "longformer", "pattern", "global" (patch tokens attend to prefix tokens only), a
      registered subclass of `GlobalLocalAttention` that uses its projections, or "full", which
      restores timm's attention. By default "pattern" if `pattern` is given, else "longformer".
    blocks: indices of the blocks to change, negative ones counted from the end; None for all.
      Other blocks do not change.
    kwargs: arguments of longformer: window=7, sw_exact=0, mode=0, mode_switch=1.0,
      backend="auto"; of pattern: pattern="axial | local:2", chunk=8, backend="auto"; see
      `vil.build_attention`. Training with mode > 0 requires `vil.layers.attention.set_progress`.

    Raises ValueError for a model that cannot be patched and for an unknown name, argument, block or
    value. The model is then unchanged.
    """
    attention = attention or ("pattern" if "pattern" in kwargs else "longformer")
    cls = find_replacement(attention)
    kwargs = DEFAULTS.get(attention, {}) | kwargs
    check_arguments(attention, kwargs)
    check_model(model)
    attentions = list(find_attentions(model, blocks))
    patched = (module for module in model.modules() if isinstance(module, PatchedAttention))
    grid = next((m.grid for m in patched), None) or PatchGrid(tuple(model.patch_embed.grid_size))
    replacements = []
    for parent, name, module in attentions:
        plain = module.restore() if isinstance(module, PatchedAttention) else module
        new = cls(plain, model.num_prefix_tokens, grid, **kwargs) if cls else plain
        replacements.append((parent, name, new))
    for replacement in replacements:
        setattr(*replacement)
    if any(isinstance(module, PatchedAttention) for module in model.modules()):
        grid.attach(model.patch_embed)
    else:
        grid.detach()
    return model


def find_replacement(attention: str) -> type[PatchedAttention] | None:
    """Return the class that replaces timm's attention; None to restore it.

    For a registered attention without such a class, it is made. Raises ValueError for an unknown
    name, and for an attention with projections of its own, with the choices.
    """
    if attention == RESTORE:
        return None
    if attention not in PATCHES:
        names = [*PATCHES, *(name for name in ATTENTIONS if name not in PATCHES), RESTORE]
        usable = [name for name in names if name in (*PATCHES, RESTORE) or is_patchable(name)]
        cls = ATTENTIONS.load(lookup({name: name for name in usable}, attention, WHAT))
        PATCHES[attention] = type(f"Patched{cls.__name__}", (PatchedAttention, cls), {})
    return PATCHES[attention]


def is_patchable(name: str) -> bool:
    """Return whether an attention can use the projections of timm's attention."""
    cls, base = ATTENTIONS.load(name), GlobalLocalAttention
    names = ("forward", "add_projections", "attend_all")
    return issubclass(cls, base) and all(getattr(cls, n) is getattr(base, n) for n in names)


def check_arguments(attention: str, kwargs: Mapping[str, object]) -> None:
    """Raise ValueError for an argument that the attention does not have, or a bad window."""
    if attention == RESTORE and kwargs:
        raise ValueError(f"full attention is timm's own and takes no {', '.join(kwargs)}")
    allowed = own_arguments(ATTENTIONS.load(attention))
    allowed = {name: p for name, p in allowed.items() if name not in FIXED}
    for name in kwargs:
        lookup(allowed, name, f"argument of {attention} attention in a patched model")
    window = kwargs.get("window", 1)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window must be an integer of at least 1, got {window!r}")


def check_model(model: nn.Module) -> None:
    """Raise ValueError unless the model is a vision transformer whose patch tokens form a grid.

    The message names what is missing.
    """
    subject = f"cannot patch {type(model).__name__}:"
    wanted = f"expected a timm vision transformer (with {', '.join(REQUIRED)})"
    if not isinstance(model, nn.Module):
        raise ValueError(f"cannot patch {model!r}, which is not a module; {wanted}")
    if missing := [name for name in REQUIRED if not hasattr(model, name)]:
        hint = describe_unsupported(model)
        for name, part in model.named_modules():
            if all(hasattr(part, needed) for needed in REQUIRED):
                hint = f"; its {name} ({type(part).__name__}) has: patch that"
                break
        raise ValueError(f"{subject} it lacks {', '.join(missing)}{hint}; {wanted}")
    if getattr(model.patch_embed, "grid_size", None) is None:
        raise ValueError(f"{subject} its patch_embed has no grid_size; {wanted}")
    if rate := getattr(getattr(model, "patch_drop", None), "prob", 0):
        raise ValueError(
            f"{subject} patch_drop_rate {rate:g} leaves no grid of patch tokens; "
            "build it with patch_drop_rate=0"
        )


def is_replaceable(module: nn.Module) -> bool:
    """Return whether the module is an attention that can be replaced or already is a
    replacement."""
    return type(module) in REPLACEABLE or isinstance(module, PatchedAttention)


def describe_unsupported(module: nn.Module, prefix: str = "") -> str:
    """Describe the first attention inside `module` that cannot be replaced.

    Returns an empty string if there is none.
    """
    for name, part in module.named_modules(prefix=prefix):
        if "blocks" in name and "Attention" in type(part).__name__ and not is_replaceable(part):
            return f"; its {name} is {qualified_name(type(part))}"
    return ""


def qualified_name(cls: type) -> str:
    """Return module and name of a class."""
    return f"{cls.__module__}.{cls.__name__}"


def find_attentions(
    model: nn.Module, blocks: int | Iterable[int] | None
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the attentions of the blocks: parent, attribute of the parent, module."""
    for number in resolve_indices(blocks, len(model.blocks)):
        block = model.blocks[number]
        attentions = [
            (parent, name, module)
            for parent in block.modules()
            for name, module in parent.named_children()
            if is_replaceable(module)
        ]
        if not attentions:
            place, names = f"blocks.{number}", ", ".join(map(qualified_name, REPLACEABLE))
            raise ValueError(
                f"cannot patch {type(model).__name__}: {place} ({type(block).__name__}) has no "
                f"attention that can be replaced ({names}){describe_unsupported(block, place)}"
            )
        yield from attentions


def resolve_indices(blocks: int | Iterable[int] | None, count: int) -> list[int]:
    """Convert block indices to sorted, unique, nonnegative ones.

    Raises ValueError for an index out of range.
    """
    if blocks is None:
        return list(range(count))
    blocks = [blocks] if isinstance(blocks, int) else list(blocks)
    for number in blocks:
        if not isinstance(number, int) or not -count <= number < count:
            names = f"0..{count - 1}, or -{count}..-1"
            raise ValueError(f"no block {number!r}, the model has {count}: {names}")
    return sorted({number % count for number in blocks})
