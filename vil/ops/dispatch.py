"""Which backend computes local attention: the table, what each cannot do, and the choice.

A backend never changes the result, only who computes it. It refuses a case with reasons, in
sentences. `vil.ops.tuning.tuner` fills CHOICES with what it found fastest; nothing is measured
here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from vil.ops import custom_op
from vil.ops.attention_case import Case
from vil.ops.backends import dense_masked, flex, gather_sdpa, sliding_chunk, unfold
from vil.ops.window import ALL_NINE
from vil.utils.lookup import lookup


def nothing(case: Case) -> list[str]:
    """No reason against any case."""
    return []


@dataclass(frozen=True)
class Backend:
    """`attend` computes; `unsupported` gives the reasons why it cannot in a case (none: it can).

    compiles: it calls torch.compile, so it must not be run on tensors without numbers, which torch
    would remember as a failure.
    """

    attend: Callable[..., Tensor]
    unsupported: Callable[[Case], list[str]]
    about: str
    compiles: bool = False


def _pair(forward: str, backward: str) -> Backend:
    return Backend(
        custom_op.joined(forward, backward),
        partial(custom_op.unsupported, forward, backward),
        custom_op.about(forward, backward),
    )


BACKENDS: dict[str, Backend] = {
    "masked": Backend(
        dense_masked.attend, dense_masked.unsupported, "full scores under the boolean mask"
    ),
    "chunk_autograd": Backend(
        sliding_chunk.attend_autograd, nothing, "sliding chunks, backward by autograd"
    ),
    "chunk_handgrad": Backend(
        sliding_chunk.attend_handgrad, nothing, "sliding chunks, backward by hand"
    ),
    "gathered": Backend(
        gather_sdpa.attend, nothing, "neighbours gather_sdpa, one fused attention; exportable"
    ),
    "flex": Backend(
        flex.attend, flex.attend_unsupported, custom_op.FORWARDS["flex"].about, compiles=True
    ),
    **{name: _pair(forward, backward) for forward, backward, name in custom_op.pairs()},
    "unfold_tensor": Backend(
        unfold.attend_tensor, unfold.unsupported, "a copy of each token's neighbours, by views"
    ),
    "unfold_nnf": Backend(
        unfold.attend_nnf, unfold.unsupported, "a copy of each token's neighbours, by F.unfold"
    ),
}
# What is taken untuned, by kind of device (cpu for any other): the first that can run. A backend
# that compiles at its first call, or that a user added, is taken only where it was tuned or pinned.
PREFERENCE = {
    "cpu": ("blocked", "chunk_handgrad", "gathered", "chunk_autograd"),
    # triton is to come first here once scripts/gpu_check.sh has passed on a device
    "cuda": ("chunk_handgrad", "gathered", "chunk_autograd"),
}
# Tokens of a grid at most, and the pairs that chunks would multiply at least, of all pairs, for
# plain attention; beyond, all scores of a batch would take too much memory.
PLAIN = ((200, 0.3), (1024, 0.7))
CHOICES: dict[str, str] = {}  # {Case.bucket(): the backend found fastest}


def register_backend(
    name: str,
    attend: Callable[..., Tensor],
    *,
    unsupported: Callable[[Case], list[str]] = nothing,
    about: str = "added at run time",
) -> None:
    """Add a backend of your own to the table, for `backend=name` and for the tuner.

    attend(q, k, v, window, *, num_global, bias, valid, scale, dropout_p) -> (B, N, L, D): shapes as
    for `vil.ops.local_attention`. unsupported(case): reasons why it cannot compute a case, none if
    it can. Add it before the model is built or compiled. Raises ValueError for a name that is
    taken.
    """
    if name in BACKENDS:
        raise ValueError(f"there is a backend {name!r} already (names: {', '.join(BACKENDS)})")
    BACKENDS[name] = Backend(attend, unsupported, about)


def preferred(case: Case) -> tuple[str, ...]:
    """The backends to be taken untuned, best first.

    Where the window spans much of a small grid, plain attention under a mask is up to 3 times as
    fast on a CPU as anything that cuts the grid.
    """
    names = PREFERENCE.get(case.device, PREFERENCE["cpu"])
    window = case.window
    if case.device != "cpu" or case.symbolic:
        return names
    rows, cols = (3 * n - (0 if window.cyclic else 2) for n in window.chunks)
    met = rows * cols * window.tile**2 if window.offsets == ALL_NINE else 0
    plain = any(
        window.length <= tokens and met > share * window.length**2 for tokens, share in PLAIN
    )
    return ("masked", *names) if plain else names


def choose(case: Case, backend: str = "auto") -> str:
    """The backend for a case: the pinned one, the tuned one, or the first preferred that can run.

    Raises ValueError for an unknown name (with the choices) and for a pinned backend that cannot
    run (its reasons).
    """
    if backend != "auto":
        reasons = lookup(BACKENDS, backend, "backend").unsupported(case)
        if reasons:
            raise ValueError(f"backend {backend!r} cannot run here: {'; '.join(reasons)}")
        return backend
    if name := tuned(case):
        return name
    for name in preferred(case):
        if not BACKENDS[name].unsupported(case):
            return name
    against = {name: "; ".join(entry.unsupported(case)) for name, entry in BACKENDS.items()}
    raise ValueError(f"no backend can run here: {against}")


def tuned(case: Case) -> str | None:
    """The backend that was found fastest for the case's bucket, if it was tuned and can run."""
    if case.symbolic or not CHOICES:
        return None
    name = CHOICES.get(case.bucket())
    able = name in BACKENDS and not BACKENDS[name].unsupported(case)
    return name if able else None


def explain(case: Case, backend: str = "auto") -> dict[str, str]:
    """For each backend "chosen" (also "chosen, tuned" or "chosen, pinned"), "could run", or the
    reasons why it cannot, which one that is pinned has too."""
    if backend == "auto":
        chosen = tuned(case)
        word = "chosen, tuned" if chosen else "chosen"
        chosen = chosen or choose(case)
    else:
        chosen, word = backend, "chosen, pinned"
    verdicts = {}
    for name, entry in BACKENDS.items():
        reasons = "; ".join(entry.unsupported(case))
        pinned = f"pinned, but cannot run: {reasons}" if name == backend and reasons else ""
        verdicts[name] = pinned or reasons or (word if name == chosen else "could run")
    return verdicts
