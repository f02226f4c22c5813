"""Registry of the backends of local attention, with their modules and limits.

Importing this package imports neither torch nor a backend, so that commands can list the names
quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

from vil.utils.registry import Entry, Registry, load_object

if TYPE_CHECKING:
    from torch import Tensor

    from vil.ops.attention_case import Case
    from vil.ops.call import Call
    from vil.ops.window import Window


def no_limits(case: Case) -> list[str]:
    """Return an empty list, because a backend without limits supports every `Case`."""
    return []


def always_ready() -> list[str]:
    """Return an empty list of failures, because the backend needs no preparation."""
    return []


def _windows_only(limits: Callable[[Case], list[str]]) -> Callable[[Case], list[str]]:
    """Wrap the function `limits` so that it also rejects the layouts of patterns.

    limits: a function that takes a `Case` and returns the reasons why the case is not supported.
    """

    def unsupported(case: Case) -> list[str]:
        return ["it computes windows, not patterns"] if case.is_layout else limits(case)

    return unsupported


@dataclass(frozen=True)
class Backend(Entry):
    """Entry of the registry BACKENDS: a function that computes attention.

    `home` is the location "module:attribute" of the function. `facts` may have these keys:
    unsupported, prepare: the functions that the properties of the same names describe, or their
    locations. By default, every case is supported, and nothing is prepared.
    layouts: whether the layouts of patterns are supported. By default, only windows are supported.
    operator: whether the function is an operator of `vil.ops.custom_op`. False by default.
    """

    @cached_property
    def run(self) -> Callable:
        """The function that computes attention for a `vil.ops.call.Call`, imported at first use."""
        return load_object(self.home)

    @cached_property
    def unsupported(self) -> Callable[[Case], list[str]]:
        """The function that takes a `Case` and returns the reasons why the case is not supported.

        The function returns an empty list if the case is supported.
        """
        limits = load_object(self.facts.get("unsupported", no_limits))
        return limits if self.facts.get("layouts") else _windows_only(limits)

    @cached_property
    def prepare(self) -> Callable[[], list[str]]:
        """The function that gets the backend ready to run, for example by compiling it.

        It is called when the backend is selected. It returns the reasons why the preparation
        failed, or an empty list.
        """
        return load_object(self.facts.get("prepare", always_ready))

    def reasons_against(self, case: Case) -> list[str]:
        """Return the reasons why the backend cannot compute a `Case`; an empty list if it can.

        If the case is supported, this method also prepares the backend, for example by compiling
        it. If the preparation fails, the reasons for this are returned.
        """
        # the second time, it is known what was prepared, such as the instructions of a library
        return self.unsupported(case) or self.prepare() or self.unsupported(case)

    @cached_property
    def attend(self) -> Callable:
        """A function attend(q, k, v, window, **options) that computes attention.

        The options are num_global, bias, valid_hw, scale and dropout_p.
        """
        from vil.ops.call import Call

        @wraps(self.run)
        def attend(q: Tensor, k: Tensor, v: Tensor, window: Window, **options: Any) -> Tensor:
            return self.run(Call(q, k, v, window, **options))

        return attend

    @property
    def is_operator(self) -> bool:
        """Whether the function is an operator of `vil.ops.custom_op`."""
        return bool(self.facts.get("operator"))

    def resolve(self) -> None:
        """Import the backend's functions now instead of at first use.

        Call this before torch.compile, which cannot trace an import.
        """
        _ = self.run, self.unsupported, self.prepare, self.attend


class BackendRegistry(Registry[Backend]):
    """Registry of backends that also finds former names, which it does not list."""

    def __init__(self) -> None:
        super().__init__("backend", entry_type=Backend)

    def __getitem__(self, name: str) -> Backend:
        return self.entries[FORMER_NAMES.get(name, name)]


FORMER_NAMES = {"masked_sdpa": "masked"}  # in configs and folders of earlier runs
BACKENDS = BackendRegistry()


def _add(name: str, home: str, about: str, limits: str | None = None, **facts: Any) -> None:
    """Add a backend of this package to BACKENDS.

    home: location "module:function", relative to this package, of the function that computes
    attention.
    limits: name of the function in the same module that returns the reasons why a case is not
    supported; None if all cases are supported.
    facts: see `Backend`.
    """
    if limits:
        facts["unsupported"] = f"{__name__}.{home.partition(':')[0]}:{limits}"
    BACKENDS.add(name, f"{__name__}.{home}", about, **facts)


_RECOMPUTES = "the backward pass recomputes the scores"
_PASSES = dict(limits="unsupported", layouts=True, operator=True)
_UNFOLD = "a copy of each token's neighbors, by"
_SLIDING = "vil_2021.sliding_chunk"
_add("masked", "masked:run", "full attention with a dense mask", "unsupported", layouts=True)
_add("gathered", "gathered:run", "fused attention on gathered neighbor chunks; exportable")
_add("blocked", "blocked:attend", f"a few chunks at a time; {_RECOMPUTES}", **_PASSES)
_add(
    "native",
    "native:attend",
    f"compiled C++ for CPUs; {_RECOMPUTES}",
    **_PASSES,
    prepare=f"{__name__}.native:prepare",
)
_add("triton", "triton.fused:attend", f"fused Triton kernels; {_RECOMPUTES}", **_PASSES)
_add("chunk_autograd", f"{_SLIDING}:run_autograd", "sliding chunks, backward by autograd")
_add("chunk_handgrad", f"{_SLIDING}:run_handgrad", "sliding chunks, hand-written backward")
_add("unfold_tensor", "vil_2021.unfold:run_tensor", f"{_UNFOLD} views", "unsupported")
_add("unfold_nnf", "vil_2021.unfold:run_nnf", f"{_UNFOLD} F.unfold", "unsupported")
BUILT_IN = frozenset(BACKENDS)


def register_backend(
    name: str,
    attend: Callable[..., Any],
    *,
    unsupported: Callable[[Case], list[str]] = no_limits,
    about: str = "registered at run time",
) -> None:
    """Register a custom backend. Users select it with `backend=name`, and the tuner measures it.

    attend: a function attend(q, k, v, window, *, num_global, bias, valid_hw, scale, dropout_p) that
    returns (B, N, L, D), with the shapes of `vil.ops.local_attention`.
    unsupported: a function that takes a `Case` and returns the reasons why it is not supported, or
    an empty list.
    about: a short description.

    The backend is called with a `Window` only, never with the `Layout` of a pattern. Register the
    backend before a model is built or compiled. Raises ValueError if the name is already taken.
    """

    @wraps(attend)
    def run(call: Call) -> Tensor:
        q, k, v, window, *options = call
        names = ("num_global", "bias", "valid_hw", "scale", "dropout_p")
        return attend(q, k, v, window, **dict(zip(names, options)))

    BACKENDS.register(name, run, about, unsupported=unsupported)
    BACKENDS[name].resolve()
