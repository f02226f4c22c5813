"""The backends of local attention by name: their modules and their limits.

Importing this package loads neither torch nor a backend, so that commands can list the names.
`vil.ops.dispatch` selects a backend for a call.

A backend that recomputes the scores in its backward pass is a pair of an entry of FORWARDS and an
entry of BACKWARDS. All passes share one contract (see `vil.ops.custom_op`), so that any forward
pass can be paired with any backward pass, under a name like "flex+blocked".
"""

from __future__ import annotations

import inspect
import itertools
import warnings
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
    """Return no reasons: the backend supports every case."""
    return []


@dataclass(frozen=True)
class Implementation(Entry):
    """An entry with a function and its limits.

    Facts: `unsupported`, the function that gives the reasons against a case, or its home; none for
    no limits. `passes`, the names of a forward and a backward pass: the homes are then factories,
    called with both names.
    """

    @cached_property
    def run(self) -> Callable:
        """The function that computes a `vil.ops.call.Call`."""
        return self._resolve(self.home)

    @cached_property
    def unsupported(self) -> Callable[[Case], list[str]]:
        """unsupported(case): the reasons why it cannot compute a case, none if it can."""
        return self._resolve(self.facts.get("unsupported", no_limits))

    def resolve(self) -> None:
        """Import the functions now: torch.compile cannot trace an import on first use."""
        _ = self.run, self.unsupported

    def _resolve(self, home: Any) -> Callable:
        function, passes = load_object(home), self.facts.get("passes")
        return function(*passes) if isinstance(home, str) and passes else function


@dataclass(frozen=True)
class Backend(Implementation):
    """An entry of BACKENDS.

    Fact `compiles`: it calls torch.compile, so it must not run on fake tensors, which torch would
    record as a failed compilation.
    """

    @cached_property
    def attend(self) -> Callable:
        """`run` with the arguments that `register_backend` describes."""
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


def _add_passes(name: str, module: str, about: str, *registries: Registry) -> None:
    home = f"{__name__}.{module}"
    for registry, function in zip(registries, ("forward", "backward")):
        registry.add(name, f"{home}:{function}", about, unsupported=f"{home}:unsupported")


def _add(name: str, home: str, about: str, limits: str | None = None, **facts: Any) -> None:
    """Add a backend of vil.ops.backends; `limits` is a function beside the one in `home`."""
    if limits:
        facts["unsupported"] = f"{__name__}.{home.partition(':')[0]}:{limits}"
    BACKENDS.add(name, f"{__name__}.{home}", about, **facts)


_BLOCKED = "a few chunks at a time, scores recomputed in the backward pass"
_TRITON = "one fused kernel each way, scores recomputed in the backward pass"
_FLEX = "torch's FlexAttention on tokens in chunk order"
_UNFOLD = "a copy of each token's neighbors, by"
_add_passes("blocked", "blocked", _BLOCKED, FORWARDS, BACKWARDS)
_add_passes("triton", "triton.fused", _TRITON, FORWARDS, BACKWARDS)
_add_passes("flex", "flex", _FLEX, FORWARDS)
_add("masked", "dense_masked:run", "all scores under a boolean mask", "unsupported")
_add("chunk_autograd", "sliding_chunk:run_autograd", "sliding chunks, backward by autograd")
_add("chunk_handgrad", "sliding_chunk:run_handgrad", "sliding chunks, hand-written backward")
_add("gathered", "gather_sdpa:run", "gathered neighbor chunks, one fused attention; exportable")
_add("flex", "flex:run", _FLEX, "run_unsupported", compiles=True)
for _pair in itertools.product(FORWARDS, BACKWARDS):
    _forward, _backward = _pair
    _same = _forward == _backward
    BACKENDS.add(
        _forward if _same else f"{_forward}+{_backward}",
        "vil.ops.custom_op:join_passes",
        FORWARDS[_forward].about if _same else f"forward of {_forward}, backward of {_backward}",
        unsupported="vil.ops.custom_op:join_limits",
        passes=_pair,
    )
_add("unfold_tensor", "unfold:run_tensor", f"{_UNFOLD} views", "unsupported")
_add("unfold_nnf", "unfold:run_nnf", f"{_UNFOLD} F.unfold", "unsupported")


def register_backend(
    name: str,
    attend: Callable[..., Any],
    *,
    unsupported: Callable[[Case], list[str]] = no_limits,
    about: str = "registered at run time",
) -> None:
    """Register a backend, for `backend=name` and for the tuner.

    attend(q, k, v, window, *, num_global, bias, valid_hw, scale, dropout_p) -> (B, N, L, D): shapes
    as for `vil.ops.local_attention`. unsupported(case): the reasons why it cannot compute a case,
    none if it can. Register it before the model is built or compiled. Raises ValueError for a name
    that is taken.
    """
    parameters = inspect.signature(attend).parameters
    valid = "valid" if "valid" in parameters and "valid_hw" not in parameters else "valid_hw"
    if valid == "valid":
        text = f"backend {name}: the argument valid is now valid_hw"
        warnings.warn(text, DeprecationWarning, stacklevel=2)

    @wraps(attend)
    def run(call: Call) -> Tensor:
        q, k, v, window, *options = call
        names = ("num_global", "bias", valid, "scale", "dropout_p")
        return attend(q, k, v, window, **dict(zip(names, options)))

    BACKENDS.register(name, run, about, unsupported=unsupported)
    BACKENDS[name].resolve()
