"""Which backend computes local attention: the table, what each cannot do, and the choice.

A backend never changes the result, only who computes it. It refuses a case with reasons, in
sentences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vil.ops import recompute
from vil.ops.backends import blocked, gathered, masked, sliding_chunk, unfold
from vil.ops.case import Case
from vil.utils.table import lookup


@dataclass(frozen=True)
class Backend:
    """`attend` computes; `unsupported` gives the reasons why it cannot in a case (none: it can)."""

    attend: Callable[..., Tensor]
    unsupported: Callable[[Case], list[str]]
    about: str


def _nothing(case: Case) -> list[str]:
    return []


BACKENDS: dict[str, Backend] = {
    "masked": Backend(masked.attend, masked.unsupported, "full scores under the boolean mask"),
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
        blocked.unsupported,
        "a few chunks at a time, scores computed twice and never stored",
    ),
    "unfold_tensor": Backend(
        unfold.attend_tensor, unfold.unsupported, "a copy of each token's neighbours, by views"
    ),
    "unfold_nnf": Backend(
        unfold.attend_nnf, unfold.unsupported, "a copy of each token's neighbours, by F.unfold"
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
