"""Registry of the backends of local attention, with their modules and limits.

Importing this package imports neither torch nor a backend, so that commands can list the names
quickly.

Each forward pass in FORWARDS and each backward pass in BACKWARDS together form a backend. For
example, "flex+blocked" is the forward pass of flex with the backward pass of blocked. The backward
passes recompute the scores. `vil.ops.custom_op` describes the interface of the passes.
"""

from __future__ import annotations

import itertools
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
class Implementation(Entry):
    """Registry entry of a function that computes attention, or only its forward or backward pass.

    `home` is the location "module:attribute" of the function. `facts` may have these keys:
    unsupported, prepare: the functions that the properties of the same names describe, or their
    locations. By default, every case is supported, and nothing is prepared.
    layouts: whether the layouts of patterns are supported. By default, only windows are supported.
    passes: only if the backend combines two passes, their names (forward pass, backward pass).
    `home`, `unsupported` and `prepare` are then locations of factories: each takes the two names
    and returns the function to use.
    """

    @cached_property
    def run(self) -> Callable:
        """The function that computes attention for a `vil.ops.call.Call`, imported at first use."""
        return self._resolve(self.home)

    @cached_property
    def unsupported(self) -> Callable[[Case], list[str]]:
        """The function that takes a `Case` and returns the reasons why the case is not supported.

        The function returns an empty list if the case is supported.
        """
        limits = self._resolve(self.facts.get("unsupported", no_limits))
        return limits if self.facts.get("layouts") else _windows_only(limits)

    @cached_property
    def prepare(self) -> Callable[[], list[str]]:
        """The function that gets the backend ready to run, for example by compiling it.

        It is called when the backend is selected. It returns the reasons why the preparation
        failed, or an empty list.
        """
        return self._resolve(self.facts.get("prepare", always_ready))

    def reasons_against(self, case: Case) -> list[str]:
        """Return the reasons why the backend cannot compute a `Case`; an empty list if it can.

        If the case is supported, this method also prepares the backend, for example by compiling
        it. If the preparation fails, the reasons for this are returned.
        """
        # the second time, it is known what was prepared, such as the instructions of a library
        return self.unsupported(case) or self.prepare() or self.unsupported(case)

    def resolve(self) -> None:
        """Import `run`, `unsupported` and `prepare` now instead of at first use.

        Call this before torch.compile, which cannot trace an import.
        """
        _ = self.run, self.unsupported, self.prepare

    def _resolve(self, home: Any) -> Callable:
        function, passes = load_object(home), self.facts.get("passes")
        return function(*passes) if isinstance(home, str) and passes else function


@dataclass(frozen=True)
class Backend(Implementation):
    """Entry of the registry BACKENDS: a backend with its forward and its backward pass.

    `facts` may also have the key `compiles`: whether the backend calls torch.compile. Such a
    backend must not run on fake tensors, because torch would cache a failed compilation.
    """

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

    def resolve(self) -> None:
        super().resolve()
        _ = self.attend


FORWARDS = Registry("forward pass", entry_type=Implementation)
BACKWARDS = Registry("backward pass", entry_type=Implementation)
BACKENDS = Registry("backend", entry_type=Backend)


def _add_passes(name: str, module: str, about: str, *registries: Registry, **facts: Any) -> None:
    home = f"{__name__}.{module}"
    if "prepare" in facts:
        facts["prepare"] = f"{__name__}.{facts['prepare']}"
    for registry, function in zip(registries, ("forward", "backward")):
        registry.add(name, f"{home}:{function}", about, unsupported=f"{home}:unsupported", **facts)


def _add(name: str, home: str, about: str, limits: str | None = None, **facts: Any) -> None:
    """Add a backend of this package to BACKENDS.

    home: location "module:function", relative to this package, of the function that computes
    attention.
    limits: name of the function in the same module that returns the reasons why a case is not
    supported; None if all cases are supported.
    facts: properties of the backend, see `Implementation` and `Backend`.
    """
    if limits:
        facts["unsupported"] = f"{__name__}.{home.partition(':')[0]}:{limits}"
    BACKENDS.add(name, f"{__name__}.{home}", about, **facts)


_BLOCKED = "a few chunks at a time; the backward pass recomputes the scores"
_TRITON = "fused Triton kernels; the backward pass recomputes the scores"
_NATIVE = "compiled C++ for CPUs; the backward pass recomputes the scores"
_FLEX = "torch's FlexAttention on tokens in chunk order"
_UNFOLD = "a copy of each token's neighbors, by"
_add_passes("blocked", "blocked", _BLOCKED, FORWARDS, BACKWARDS, layouts=True)
_add_passes("triton", "triton.fused", _TRITON, FORWARDS, BACKWARDS, layouts=True)
_add_passes(
    "native", "native", _NATIVE, FORWARDS, BACKWARDS, layouts=True, prepare="native:prepare"
)
_add_passes("flex", "flex", _FLEX, FORWARDS, layouts=True)
_MASKED = "full attention with a dense mask"
_add("masked", "dense_masked:run", _MASKED, "unsupported", layouts=True)
_FUSED = "torch's fused attention with a dense mask"
_add("masked_sdpa", "masked_sdpa:run", _FUSED, "unsupported", layouts=True)
_add("chunk_autograd", "sliding_chunk:run_autograd", "sliding chunks, backward by autograd")
_add("chunk_handgrad", "sliding_chunk:run_handgrad", "sliding chunks, hand-written backward")
_add("gathered", "gather_sdpa:run", "fused attention on gathered neighbor chunks; exportable")
_add("flex", "flex:run", _FLEX, "run_unsupported", compiles=True, layouts=True)
for _pair in itertools.product(FORWARDS, BACKWARDS):
    _forward, _backward = _pair
    _same = _forward == _backward
    BACKENDS.add(
        _forward if _same else f"{_forward}+{_backward}",
        "vil.ops.custom_op:join_passes",
        FORWARDS[_forward].about if _same else f"forward of {_forward}, backward of {_backward}",
        unsupported="vil.ops.custom_op:join_limits",
        prepare="vil.ops.custom_op:join_prepare",
        passes=_pair,
        layouts=True,  # `join_limits` rejects layouts that a pass does not support
    )
_add("unfold_tensor", "unfold:run_tensor", f"{_UNFOLD} views", "unsupported")
_add("unfold_nnf", "unfold:run_nnf", f"{_UNFOLD} F.unfold", "unsupported")
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
