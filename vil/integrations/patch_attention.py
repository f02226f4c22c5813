"""Replace the attention modules of a timm vision transformer by those of vil.

The weights of the model do not change.

model = timm.create_model("vit_small_patch16_224", img_size=1024, pretrained=True)
vil.patch_attention(model, window=8)                      # every block
vil.patch_attention(model, pattern="axial | local:3")     # a pattern instead of a window
vil.patch_attention(model, "full", blocks=[-2, -1])       # restore timm's in the last two
"""

import ast
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from timm.layers import Attention, AttentionRope, to_2tuple
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
from vil.ops.patterns import Pattern
from vil.ops.reference import attended_keys
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
# arguments that are not accepted: timm's attention has one set of projections, and the timm model
# has its own position embeddings
FIXED = {"share_weights", "max_reach"}
log = logging.getLogger(__name__)


def patch_attention(
    model: nn.Module,
    attention: str | None = None,
    *,
    blocks: int | Iterable[int] | None = None,
    **kwargs,
) -> nn.Module:
    """Replace the attention modules of a timm vision transformer by `attention`, in place.

    Returns the model.

    In vil's attention, the patch tokens become the local tokens, and the prefix tokens (class,
    distillation, registers) become the global tokens. The grid of patch tokens may differ between
    forward passes. Projections, norms, gates and drop rates are not replaced, so parameters and
    state dict keys do not change. A model can be patched more than once.

    attention: "longformer", "pattern", "global" (patch tokens attend to prefix tokens only), or
      "full", which restores timm's attention. Also the name of a registered subclass of
      `GlobalLocalAttention` that does not override how inputs and outputs are projected. The
      default is "pattern" if the argument `pattern` is given, otherwise "longformer".
    blocks: indices of the blocks to change, negative ones counted from the end; None for all.
    kwargs: arguments of the attention. `vil.layers.attention.LongformerAttention` and
      `PatternAttention` explain them. The defaults are:
      longformer: window=7, sw_exact=0, mode=0, mode_switch=1.0, backend="auto". Training with
      mode > 0 requires `vil.layers.attention.set_progress`.
      pattern: pattern="axial | local:2", chunk=8, backend="auto".

    Raises ValueError if the model cannot be patched, or if the name of the attention, an argument
    or a block index is invalid. In this case, the model is not changed.
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


def patch_from_text(model: nn.Module, text: str, img_size: int) -> None:
    """Call `patch_attention` with arguments from a text, such as "pattern='axial', chunk=8".

    img_size: side of the training images in pixels, for a warning if windows cover the whole grid.
    Raises ValueError as `patch_attention` does, and if the text is not valid.
    """
    try:
        call: Any = ast.parse(f"patch({text})", mode="eval").body
        arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if call.args or not arguments or arguments.keys() & {None, "model"}:
            raise ValueError(text)
    except (SyntaxError, ValueError, AttributeError):
        raise ValueError(
            f"MODEL.PATCH_ATTENTION {text!r}: expected arguments of vil.patch_attention as in "
            "Python, such as window=8 or pattern='axial | local:3', chunk=8"
        ) from None
    try:
        patch_attention(model, **arguments)
    except ValueError as error:
        raise ValueError(f"MODEL.PATCH_ATTENTION {text!r}: {error}") from None
    grid = patch_grid(model, img_size)
    patched = (module for module in model.modules() if isinstance(module, PatchedLongformer))
    windows = {module.window(grid, 0) for module in patched}
    # the corner attends to the fewest patches
    is_full = [
        max(grid) <= window.size or len(attended_keys(window, 0, 0)) >= grid[0] * grid[1]
        for window in windows
    ]
    if windows and all(is_full):
        log.warning(
            "MODEL.PATCH_ATTENTION %s: for images of %d pixels, each of the %d x %d patches "
            "attends to all others: choose a smaller window, or larger images",
            text,
            img_size,
            *grid,
        )


def patch_grid(model: nn.Module, img_size: int) -> tuple[int, int]:
    """Return the rows and columns of the patches of square images of `img_size` pixels in a timm
    vision transformer, or in the one that it contains."""
    embed = next(m.patch_embed for m in model.modules() if hasattr(m, "patch_embed"))
    height, width = to_2tuple(embed.patch_size)
    return img_size // height, img_size // width


def find_replacement(attention: str) -> type[PatchedAttention] | None:
    """Return the class that replaces timm's attention, or None for "full".

    attention: a name as in `patch_attention`. Raises ValueError, with the valid names in the
    message, for an unknown name or an attention that cannot use timm's projections.
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
    """Return whether the registered attention `name` can use timm's projections.

    The attention's class must inherit the methods of `GlobalLocalAttention` that project inputs and
    outputs.
    """
    cls, base = ATTENTIONS.load(name), GlobalLocalAttention
    names = ("forward", "add_projections", "attend_all")
    return issubclass(cls, base) and all(getattr(cls, n) is getattr(base, n) for n in names)


def check_arguments(attention: str, kwargs: Mapping[str, object]) -> None:
    """Raise ValueError if the attention does not accept an argument.

    Also raises ValueError if `window` is not a positive integer, or `pattern` has a wrong type.
    attention: name of the attention, see `patch_attention`. kwargs: arguments of the attention.
    """
    if attention == RESTORE and kwargs:
        raise ValueError(
            "attention 'full' restores timm's attention, so it takes no arguments, got "
            f"{', '.join(kwargs)}"
        )
    allowed = own_arguments(ATTENTIONS.load(attention))
    allowed = {name: p for name, p in allowed.items() if name not in FIXED}
    for name in kwargs:
        lookup(allowed, name, f"argument of {attention} attention in a patched model")
    pattern = kwargs.get("pattern", "")
    if not isinstance(pattern, str | Pattern):
        raise ValueError(f"pattern must be a string such as 'axial | local:2', got {pattern!r}")
    window = kwargs.get("window", 1)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window must be an integer of at least 1, got {window!r}")


def check_model(model: nn.Module) -> None:
    """Raise ValueError unless the model is a vision transformer whose patch tokens form a grid.

    The error message names the missing attributes.
    """
    cls = type(model).__name__
    wanted = f"expected a timm vision transformer (with {', '.join(REQUIRED)})"
    if not isinstance(model, nn.Module):
        raise ValueError(f"cannot patch {model!r}, which is not a module; {wanted}")
    if missing := [name for name in REQUIRED if not hasattr(model, name)]:
        hint = describe_unsupported(model)
        for name, part in model.named_modules():
            if all(hasattr(part, needed) for needed in REQUIRED):
                hint = f", but its submodule {name} ({type(part).__name__}) has these attributes"
                hint += ": patch the submodule"
                break
        raise ValueError(f"cannot patch {cls}: it lacks {', '.join(missing)}{hint}; {wanted}")
    if getattr(model.patch_embed, "grid_size", None) is None:
        raise ValueError(f"cannot patch {cls}: its patch_embed has no grid_size; {wanted}")
    if rate := getattr(getattr(model, "patch_drop", None), "prob", 0):
        raise ValueError(
            f"cannot patch {cls}: with patch_drop_rate {rate:g}, the remaining patch tokens do not "
            "form a grid; build the model with patch_drop_rate=0"
        )


def is_replaceable(module: nn.Module) -> bool:
    """Return whether `patch_attention` can replace the module.

    It can replace the attention modules of timm that vil supports, and those modules of vil that an
    earlier call of `patch_attention` has inserted.
    """
    return type(module) in REPLACEABLE or isinstance(module, PatchedAttention)


def describe_unsupported(module: nn.Module, prefix: str = "") -> str:
    """Name the first attention module in the blocks of `module` that cannot be replaced.

    Returns text to append to an error message, such as "; its blocks.0.attn is timm.X.Attention".
    Returns "" if all attention modules can be replaced. prefix: name of `module` in its model.
    """
    for name, part in module.named_modules(prefix=prefix):
        if "blocks" in name and "Attention" in type(part).__name__ and not is_replaceable(part):
            return f"; its {name} is {qualified_name(type(part))}"
    return ""


def qualified_name(cls: type) -> str:
    """Return the name of a class with its module, such as "timm.layers.attention.Attention"."""
    return f"{cls.__module__}.{cls.__name__}"


def find_attentions(
    model: nn.Module, blocks: int | Iterable[int] | None
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (parent, name, attention) for each attention module that can be replaced.

    The attention module is the attribute `name` of the module `parent`. blocks: indices of the
    transformer blocks to search; None for all. Raises ValueError if one of these blocks has no such
    attention module.
    """
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
                f"attention of a supported class ({names}){describe_unsupported(block, place)}"
            )
        yield from attentions


def resolve_indices(blocks: int | Iterable[int] | None, count: int) -> list[int]:
    """Convert block indices to a sorted list of unique, nonnegative indices.

    blocks: indices, negative ones counted from the end; None for all blocks. count: number of
    blocks of the model. Raises ValueError for an index out of range.
    """
    if blocks is None:
        return list(range(count))
    blocks = [blocks] if isinstance(blocks, int) else list(blocks)
    for number in blocks:
        if not isinstance(number, int) or not -count <= number < count:
            names = f"0..{count - 1}, or -{count}..-1"
            raise ValueError(f"there is no block {number!r}: expected an index in {names}")
    return sorted({number % count for number in blocks})
