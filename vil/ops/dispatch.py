"""Select the backend that computes a call of local attention.

All backends compute the same result. `vil.ops.tuning.tuner` times them, and stores the fastest
backend of each case in CHOICES.
"""

import math

from vil.ops.attention_case import Case
from vil.ops.backends import BACKENDS
from vil.ops.window import ALL_NINE
from vil.utils.lookup import lookup
from vil.utils.transforms import is_exporting

for _backend in BACKENDS.values():
    _backend.resolve()

# {device: backends in order of preference} for a case that is not tuned: the first backend that
# supports the case is selected. Devices that are not listed use those of cpu. Backends that compile
# on their first call (flex, native), and those that a user registered, are selected only if tuned
# or pinned.
PREFERENCE = {
    "cpu": ("blocked", "chunk_handgrad", "gathered", "chunk_autograd"),
    # triton becomes the first once scripts/gpu_check.sh has passed on a device
    "cuda": ("chunk_handgrad", "gathered", "chunk_autograd"),
}
# Backends for export, because an exported file must not need the operators of this package.
EXPORTABLE = ("gathered", "chunk_autograd")
# (largest number of tokens, share of pairs): on grids of at most this many tokens, full attention
# with a dense mask is preferred if the chunks of the window would multiply more than this share of
# all token pairs. On larger grids, the scores of a batch would take too much memory.
MASKED = ((200, 0.3), (1024, 0.7))
# {dense backend: (largest number of tokens, density of chunk pairs), ...}: on grids of at most this
# many tokens, a layout of at most this density is computed in chunks on a CPU, not by the dense
# backend. The limits are from benchmarks/layouts.py. On an AMD EPYC and on an Intel Xeon, the
# selected method takes at most 1.25 times as long as the other one.
SPARSE = {
    "masked_sdpa": ((200, 0.28), (1024, 0.45), (math.inf, 0.7)),
    "masked": ((256, 0.65), (math.inf, 1.0)),
}
CHOICES: dict[str, str] = {}  # {Case.bucket(): the fastest backend}


def preferred(case: Case) -> tuple[str, ...]:
    """Return the candidate backends for a case that is not tuned, best first.

    On a CPU, full attention comes first for large windows: `masked_sdpa` if every query attends to
    the whole grid, and `masked`, which uses a dense mask, if the window covers much of a small
    grid. Attention patterns have their own order, see `_preferred_for_layout`.
    """
    if is_exporting():
        return ("masked",) if case.is_layout else EXPORTABLE
    names = PREFERENCE.get(case.device, PREFERENCE["cpu"])
    window = case.window
    if case.is_layout:
        return _preferred_for_layout(case)
    if case.device != "cpu" or case.symbolic:
        return names
    if window.covers_grid:
        return ("masked_sdpa", *names)
    rows, cols = (3 * n - (0 if window.cyclic else 2) for n in window.chunks)
    pairs = rows * cols * window.tile**2 if window.offsets == ALL_NINE else 0
    masked = any(
        window.length <= tokens and pairs > share * window.length**2 for tokens, share in MASKED
    )
    return ("masked", *names) if masked else names


def _preferred_for_layout(case: Case) -> tuple[str, ...]:
    """Return the candidate backends for an attention pattern that is not tuned, best first.

    On a CPU, `blocked` comes first if the pattern is sparse (see `is_sparse`), because it computes
    only the attended pairs of chunks. Otherwise, full attention with a dense mask comes first.
    """
    if case.symbolic:
        return ("masked",)
    if case.device != "cpu":
        return ("masked_sdpa", "masked", "blocked")
    return ("blocked", *SPARSE) if is_sparse(case) else (*SPARSE, "blocked")


def describe_crossover() -> str:
    """Describe in one line which backends are selected for attention patterns on a CPU.

    The line has the limits of `Layout.density` above which full attention with a dense mask is
    selected instead of `blocked`. They apply only to cases that are not tuned.
    """
    rules = [
        f"{name} above a density of {density}"
        + (f" up to {tokens} tokens" if tokens < math.inf else " on larger grids")
        for name, steps in SPARSE.items()
        for tokens, density in steps
        if density < 1
    ]
    return f"patterns on CPUs, untuned: {', '.join(rules)}; else blocked"


def is_sparse(case: Case) -> bool:
    """Return whether a layout is so sparse that a CPU computes it faster in chunks than by full
    attention with a dense mask. Also returns True if no dense backend supports the case.

    The limits of the layout's density are in SPARSE. Used only for cases that are not tuned.
    """
    dense = next((name for name in SPARSE if not BACKENDS[name].unsupported(case)), None)
    if dense is None:
        return True
    density = next(density for tokens, density in SPARSE[dense] if case.window.length <= tokens)
    return density >= 1 or case.window.density <= density


def choose(case: Case, backend: str = "auto") -> str:
    """Return the name of the backend for a case.

    backend: a name, or "auto". "auto" selects the backend that tuning found to be fastest. If the
    case is not tuned, or if that backend does not support the case, "auto" selects the first
    backend of `preferred` that supports the case.
    Raises ValueError if the name is unknown, if the named backend does not support the case, or if
    no backend supports it.
    """
    if backend != "auto":
        reasons = lookup(BACKENDS, backend, "backend").reasons_against(case)
        if reasons:
            raise ValueError(f"backend {backend!r} cannot run this call: {'; '.join(reasons)}")
        return backend
    if name := tuned(case) or _choose_untuned(case):
        return name
    reasons = {name: "; ".join(entry.unsupported(case)) for name, entry in BACKENDS.items()}
    raise ValueError(f"no attention backend supports this call: {reasons}")


def _choose_untuned(case: Case) -> str | None:
    """Return the first preferred backend that supports a case, or None if there is none."""
    for name in preferred(case):
        if not BACKENDS[name].unsupported(case):
            return name
    return None


def tuned(case: Case) -> str | None:
    """Return the backend that tuning found to be fastest for a case.

    Returns None if the case is not tuned, or if this backend does not support it.
    """
    if case.symbolic or not CHOICES or is_exporting():
        return None
    name = CHOICES.get(case.bucket())
    usable = name in BACKENDS and not BACKENDS[name].reasons_against(case)
    return name if usable else None


def explain(case: Case, backend: str = "auto") -> dict[str, str]:
    """Return {backend: verdict} for all backends.

    The verdict of the selected backend is "chosen", followed by ", tuned" if tuning found it to be
    fastest, or by ", pinned" if `backend` names it. The verdict of another backend is "could run",
    or the reasons why it cannot. A pinned backend is prepared, for example compiled, to check that
    it can run. Raises ValueError if `backend` is unknown.
    """
    if backend == "auto":
        chosen = tuned(case)
        word = "chosen, tuned" if chosen else "chosen"
        chosen = chosen or _choose_untuned(case)
    else:
        lookup(BACKENDS, backend, "backend")
        chosen, word = backend, "chosen, pinned"
    verdicts = {}
    for name, entry in BACKENDS.items():
        if name == backend and (reasons := entry.reasons_against(case)):
            verdicts[name] = f"pinned, but cannot run: {'; '.join(reasons)}"
        else:
            able = word if name == chosen else "could run"
            verdicts[name] = "; ".join(entry.unsupported(case)) or able
    return verdicts
