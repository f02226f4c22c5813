"""Which backend computes local attention: the table, what each cannot do, and the choice.

A backend never changes the result, only who computes it. It refuses a case with reasons, in
sentences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vil.ops import recompute
from vil.ops.backends import gathered, masked, sliding_chunk, unfold
from vil.ops.bias import LocalBias
from vil.ops.window import Window
from vil.utils.table import lookup

MAX_MASKED_LENGTH = 8192  # tokens; the scores of one head would pass 256 MiB


@dataclass(frozen=True)
class Case:
    """The static facts that a backend may refuse by; q is (batch, heads, L, head_dim)."""

    window: Window
    batch: int
    heads: int
    head_dim: int
    num_global: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    table_bias: bool = False
    global_bias: bool = False
    valid: bool = False
    dropout: bool = False
    needs_grad: bool = True

    @classmethod
    def of(
        cls,
        q: Tensor,
        window: Window,
        num_global: int,
        bias: LocalBias,
        valid: Tensor | None,
        dropout_p: float,
    ) -> Case:
        """The case of a call with q (B, N, L, D)."""
        return cls(
            window,
            q.shape[0],
            q.shape[1],
            q.shape[3],
            num_global,
            q.dtype,
            q.device.type,
            bias.table is not None,
            bias.to_global is not None,
            valid is not None,
            dropout_p > 0,
            torch.is_grad_enabled(),
        )


@dataclass(frozen=True)
class Backend:
    """`attend` computes; `unsupported` gives the reasons why it cannot in a case (none: it can)."""

    attend: Callable[..., Tensor]
    unsupported: Callable[[Case], list[str]]
    about: str


def _nothing(case: Case) -> list[str]:
    return []


def _masked_unsupported(case: Case) -> list[str]:
    reasons = []
    if case.window.repeats():
        reasons.append("keys repeat: the cyclic grid has fewer chunks than the window spans")
    if case.window.length > MAX_MASKED_LENGTH:
        reasons.append(
            f"{case.window.length} tokens are more than {MAX_MASKED_LENGTH}: it stores all scores"
        )
    return reasons


def _blocked_unsupported(case: Case) -> list[str]:
    reasons = []
    if case.dropout:
        reasons.append(
            "dropout: the backward pass computes the weights again and would not draw alike"
        )
    if case.window.symbolic:
        reasons.append("the size of the grid is open: its chunks are counted beforehand")
    return reasons


def _unfold_unsupported(case: Case) -> list[str]:
    exact = case.window.exact == 1  # which has all nine offsets
    return [] if exact else ["the window is cut into chunks: unfolding sees the exact one only"]


BACKENDS: dict[str, Backend] = {
    "masked": Backend(masked.attend, _masked_unsupported, "full scores under the boolean mask"),
    "chunk_autograd": Backend(
        sliding_chunk.attend_autograd, _nothing, "sliding chunks, backward by autograd"
    ),
    "chunk_handgrad": Backend(
        sliding_chunk.attend_handgrad, _nothing, "sliding chunks, backward by hand"
    ),
    "gathered": Backend(
        gathered.attend, _nothing, "neighbours gathered, one fused attention; exportable"
    ),
    "blocked": Backend(
        recompute.joined("blocked", "blocked"),
        _blocked_unsupported,
        "a few chunks at a time, scores computed twice and never stored",
    ),
    "unfold_tensor": Backend(
        unfold.attend_tensor, _unfold_unsupported, "a copy of each token's neighbours, by views"
    ),
    "unfold_nnf": Backend(
        unfold.attend_nnf, _unfold_unsupported, "a copy of each token's neighbours, by F.unfold"
    ),
}
PREFERENCE = (
    "chunk_handgrad", "gathered", "chunk_autograd", "masked", "blocked", "unfold_tensor",
    "unfold_nnf",
)  # fmt: skip


def choose(case: Case, backend: str = "auto") -> str:
    """The backend for a case: the pinned one, or the first of PREFERENCE that has no reason against
    it.

    Raises ValueError for an unknown name (with the choices) and for a pinned backend that cannot
    run (its reasons).
    """
    if backend != "auto":
        reasons = lookup(BACKENDS, backend, "backend").unsupported(case)
        if reasons:
            raise ValueError(f"backend {backend!r} cannot run here: {'; '.join(reasons)}")
        return backend
    for name in PREFERENCE:
        if not BACKENDS[name].unsupported(case):
            return name
    raise ValueError(f"no backend can run here: {explain(case)}")


def explain(case: Case, backend: str = "auto") -> dict[str, str]:
    """For each backend "chosen", "could run", or the reasons why it cannot; pinned ones stay so."""
    able = [name for name in PREFERENCE if not BACKENDS[name].unsupported(case)]
    chosen = backend if backend != "auto" else next(iter(able), None)
    verdicts = {}
    for name, entry in BACKENDS.items():
        reasons = "; ".join(entry.unsupported(case))
        pinned = f"pinned, but cannot run: {reasons}" if name == backend and reasons else ""
        verdicts[name] = pinned or reasons or ("chosen" if name == chosen else "could run")
    return verdicts
