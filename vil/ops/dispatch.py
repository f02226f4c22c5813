"""Which backend computes local attention: the table, what each cannot do, and the choice.

A backend never changes the result, only who computes it. It refuses a case with reasons, in
sentences. `vil.ops.tuning.tuner` fills CHOICES with what it found fastest; nothing is measured
here.
"""

from __future__ import annotations

from vil.ops.attention_case import Case
from vil.ops.backends import BACKENDS
from vil.ops.window import ALL_NINE
from vil.utils.lookup import lookup

for _backend in BACKENDS.values():
    _backend.resolve()

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
