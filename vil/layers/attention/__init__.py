"""The attention modules by name, how they are built, and how they learn of the training step."""

import inspect
import logging

from torch import nn

from vil.layers.attention.base import Attention
from vil.layers.attention.full import FullAttention
from vil.layers.attention.global_only import GlobalOnlyAttention
from vil.layers.attention.linformer import LinformerAttention
from vil.layers.attention.longformer import LongformerAttention
from vil.layers.attention.performer import PerformerAttention
from vil.layers.attention.srformer import SRAttention
from vil.utils.lookup import lookup
from vil.utils.train_step import TrainStep

ATTENTIONS: dict[str, type[Attention]] = {
    "full": FullAttention,
    "longformer": LongformerAttention,
    "linformer": LinformerAttention,
    "performer": PerformerAttention,
    "srformer": SRAttention,
    "global": GlobalOnlyAttention,
}
FEATURE = {  # the argument that an architecture's letter `f` sets
    "longformer": "window",
    "linformer": "num_features",
    "performer": "num_features",
    "srformer": "ratio",
}

log = logging.getLogger(__name__)


def build_attention(
    name: str,
    *,
    dim: int,
    num_heads: int,
    num_global: int = 1,
    grid: tuple[int, int] | None = None,
    rel_pos: bool = False,
    qkv_bias: bool = True,
    attn_drop: float = 0.0,
    proj_drop: float = 0.0,
    **own,
) -> Attention:
    """An attention module: `module(x (B, G+L, C), (X, Y)) -> (B, G+L, C)`, global tokens first.

    dim: C. num_global: G. rel_pos: relative bias, for classes with `has_relative_bias`.
    grid: the usual (X, Y), needed where parameters depend on it.
    own: what the named attention takes besides:
      longformer: window, sw_exact=0, mode=0, mode_switch=1.0, share_weights=True, backend="auto"
      linformer: num_features, share_kv=True
      performer: num_features, batch_max=False
      srformer: ratio, ragged="pad"
      global: share_weights=True
    Raises ValueError for an unknown name or argument (with the choices) and for settings that do
    not fit.
    """
    kind = lookup(ATTENTIONS, name, "attention")
    for key in own:
        lookup(own_arguments(kind), key, f"argument of {name} attention")
    if kind.has_relative_bias:
        own["rel_pos"] = rel_pos
    elif rel_pos:
        raise ValueError(
            f"{name} attention has no relative bias (rel_pos): use the absolute embedding"
        )
    return kind(
        dim,
        num_heads,
        num_global=num_global,
        grid=grid,
        qkv_bias=qkv_bias,
        attn_drop=attn_drop,
        proj_drop=proj_drop,
        **own,
    )


def own_arguments(kind: type[Attention]) -> dict[str, inspect.Parameter]:
    """The arguments of an attention class that not every attention has."""
    common = {"self", "common", *inspect.signature(FullAttention).parameters}
    classes = kind.__mro__[: kind.__mro__.index(Attention)]
    found = {
        name: p for c in classes for name, p in inspect.signature(c.__init__).parameters.items()
    }
    return {name: p for name, p in found.items() if name not in common}


def set_progress(model: nn.Module, progress: TrainStep) -> None:
    """Tell every attention of the unwrapped model the step; call it before each forward."""
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    changes = [module.set_progress(progress, index) for index, module in enumerate(modules)]
    for change in dict.fromkeys(filter(None, changes)):
        log.info("%s (%d attention modules)", change, changes.count(change))
