"""Select the backend that computes a call of local attention.

All backends compute the same result. `vil.ops.tuning.tuner` times them, and stores the fastest
backend of each case in CHOICES.
"""

from collections.abc import Iterator

import torch

from vil.ops.attention_case import Case
from vil.ops.backends import BACKENDS
from vil.ops.layout import Layout
from vil.ops.window import ALL_NINE, Window
from vil.utils.lookup import lookup
from vil.utils.transforms import is_exporting

for _entry in BACKENDS.values():
    _entry.resolve()

_FUSED = () if torch.version.hip else ("triton",)  # not tested on AMD GPUs
# {device: backends in order of preference} for a case that is not tuned: the first backend that
# supports the case and can be prepared is selected. Devices that are not listed use those of cpu.
# Backends that a user registered are selected only if tuned or pinned.
PREFERENCE = {
    "cpu": ("native", "blocked", "chunk_handgrad", "gathered", "chunk_autograd"),
    "cuda": (*_FUSED, "chunk_handgrad", "gathered", "chunk_autograd"),
}
# Backends for export, because an exported file must not need the operators of this package.
EXPORTABLE = ("gathered", "chunk_autograd")
# (largest number of tokens, share of pairs): where `native` cannot run on a CPU, full attention
# with a dense mask is preferred on grids of at most this many tokens, if the chunks of the window
# or pattern would multiply more than this share of all token pairs. On larger grids, the scores of
# a batch would take too much memory.
MASKED = ((200, 0.3), (1024, 0.7))
CHOICES: dict[str, str] = {}  # {Case.bucket(): the fastest backend}
# key of CHOICES: "native", or "" in a run of an earlier version, which did not prefer this backend
DEFAULT = "default"


def preferred(case: Case) -> Iterator[str]:
    """Yield the candidate backends for a case that is not tuned, best first."""
    names = PREFERENCE.get(case.device, PREFERENCE["cpu"])
    if CHOICES.get(DEFAULT) == "":
        names = tuple(name for name in names if name != "native")
    if is_exporting():
        yield from ("masked",) if case.is_layout else EXPORTABLE
    elif not case.is_layout and (case.device != "cpu" or case.symbolic):
        yield from ("masked",) if case.device == "cuda" and is_plain(case) else ()
        yield from names
    elif case.symbolic:
        yield "masked"
    else:
        yield from names[:1] if names[0] in ("native", "triton") else ()
        if case.device == "cpu":
            yield from ("masked",) if is_dense(case) else ()
            yield from names
        yield from ("masked", "blocked")


def is_plain(case: Case) -> bool:
    """Return whether torch's fused attention, without a mask, computes a case."""
    changed = case.table_bias or case.global_bias or case.valid or case.dropout or case.symbolic
    window = case.window
    return not changed and isinstance(window, Window) and window.attends_all


def is_dense(case: Case) -> bool:
    """Return whether a CPU computes a case faster by full attention with a dense mask than in
    chunks, if it cannot use `native`. The limits are MASKED."""
    window = case.window
    if isinstance(window, Layout):
        density = window.density
    elif window.covers_grid:
        return True
    else:
        rows, cols = (3 * n - (0 if window.cyclic else 2) for n in window.chunks)
        pairs = rows * cols * window.tile**2 if window.offsets == ALL_NINE else 0
        density = pairs / window.length**2
    return any(window.length <= tokens and density > share for tokens, share in MASKED)


def choose(case: Case, backend: str = "auto") -> str:
    """Return the name of the backend for a case.

    backend: a name, or "auto". "auto" selects the backend that tuning found to be fastest. If the
    case is not tuned, or if that backend does not support the case, "auto" selects the first
    backend of `preferred` that supports the case.
    Raises ValueError if the name is unknown, if the named backend does not support the case, or if
    no backend supports it.
    """
    if backend != "auto":
        entry = lookup(BACKENDS, backend, "backend")
        if reasons := entry.reasons_against(case):
            raise ValueError(f"backend {backend!r} cannot run this call: {'; '.join(reasons)}")
        return entry.name
    if name := tuned(case) or _choose_untuned(case):
        return name
    reasons = {name: "; ".join(BACKENDS[name].unsupported(case)) for name in BACKENDS}
    raise ValueError(f"no attention backend supports this call: {reasons}")


def _choose_untuned(case: Case, *, prepare: bool = True) -> str | None:
    """Return the first preferred backend that supports a case, or None if there is none.

    prepare: whether to prepare the backend, for example compile it. One that fails is skipped.
    """
    for name in preferred(case):
        entry = BACKENDS[name]
        if not (entry.reasons_against(case) if prepare else entry.unsupported(case)):
            return name
    return None


def tuned(case: Case) -> str | None:
    """Return the backend that tuning found to be fastest for a case.

    Returns None if the case is not tuned, or if this backend does not support it.
    """
    if case.symbolic or not CHOICES or is_exporting():
        return None
    entry = BACKENDS.get(CHOICES.get(case.bucket(), ""))
    return None if entry is None or entry.reasons_against(case) else entry.name


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
        chosen = chosen or _choose_untuned(case, prepare=False)
    else:
        chosen, word = lookup(BACKENDS, backend, "backend").name, "chosen, pinned"
    verdicts = {}
    for name, entry in BACKENDS.items():
        if backend != "auto" and name == chosen and (reasons := entry.reasons_against(case)):
            verdicts[name] = f"pinned, but cannot run: {'; '.join(reasons)}"
        else:
            able = word if name == chosen else "could run"
            verdicts[name] = "; ".join(entry.unsupported(case)) or able
    return verdicts
