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

from vil.utils.registry import Entry, Registry

if TYPE_CHECKING:
    from vil.ops.attention_case import Case


def no_limits(case: Case) -> list[str]:
    """No reason against any case."""
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
        """The function that computes."""
        return self._resolve(self.home)

    @cached_property
    def unsupported(self) -> Callable[[Case], list[str]]:
        """unsupported(case): the reasons why it cannot compute a case, none if it can."""
        return self._resolve(self.facts.get("unsupported", no_limits))

    def resolve(self) -> None:
        """Import the functions now: torch.compile cannot trace an import on first use."""
        _ = self.run, self.unsupported

    def _resolve(self, home: Any) -> Callable:
        function = Entry(self.name, home).load()
        return function(*self.passes) if isinstance(home, str) and self.passes else function

    @property
    def passes(self) -> tuple[str, str] | None:
        """The forward and the backward pass that it consists of, None for a single function."""
        return self.facts.get("passes")


@dataclass(frozen=True)
class Backend(Implementation):
    """An entry of BACKENDS. `attend` has the arguments of `vil.ops.local_attention`.

    Fact `compiles`: it calls torch.compile, so it must not run on fake tensors, which torch would
    record as a failed compilation.
    """

    @property
    def attend(self) -> Callable:
        return self.run

    @property
    def compiles(self) -> bool:
        return self.facts.get("compiles", False)


FORWARDS = Registry("forward pass", entry_type=Implementation)
BACKWARDS = Registry("backward pass", entry_type=Implementation)
BACKENDS = Registry("backend", entry_type=Backend)


def _add_passes(name: str, module: str, about: str, *, backward: bool = True) -> None:
    limits = f"{module}:unsupported"
    FORWARDS.add(name, f"{module}:forward", about, unsupported=limits)
    if backward:
        BACKWARDS.add(name, f"{module}:backward", about, unsupported=limits)


def _add(name: str, home: str, about: str, limits: str | None = None, **facts: Any) -> None:
    """Add a backend of vil.ops.backends; `limits` is a function beside the one in `home`."""
    module = f"{__name__}.{home.partition(':')[0]}"
    if limits:
        facts["unsupported"] = f"{module}:{limits}"
    BACKENDS.add(name, f"{__name__}.{home}", about, **facts)


_add_passes(
    "blocked",
    "vil.ops.backends.blocked",
    "a few chunks at a time, scores recomputed in the backward pass",
)
_add_passes(
    "triton",
    "vil.ops.backends.triton.fused",
    "one fused kernel each way, scores recomputed in the backward pass",
)
_add_passes(
    "flex",
    "vil.ops.backends.flex",
    "torch's FlexAttention on tokens in chunk order",
    backward=False,
)
_add("masked", "dense_masked:attend", "all scores under a boolean mask", "unsupported")
_add("chunk_autograd", "sliding_chunk:attend_autograd", "sliding chunks, backward by autograd")
_add("chunk_handgrad", "sliding_chunk:attend_handgrad", "sliding chunks, hand-written backward")
_add("gathered", "gather_sdpa:attend", "gathered neighbor chunks, one fused attention; exportable")
_add("flex", "flex:attend", FORWARDS["flex"].about, "attend_unsupported", compiles=True)
for _forward, _backward in itertools.product(FORWARDS, BACKWARDS):
    _same = _forward == _backward
    BACKENDS.add(
        _forward if _same else f"{_forward}+{_backward}",
        "vil.ops.custom_op:join_passes",
        FORWARDS[_forward].about if _same else f"forward of {_forward}, backward of {_backward}",
        unsupported="vil.ops.custom_op:join_limits",
        passes=(_forward, _backward),
    )
_add(
    "unfold_tensor",
    "unfold:attend_tensor",
    "a copy of each token's neighbors, by views",
    "unsupported",
)
_add(
    "unfold_nnf",
    "unfold:attend_nnf",
    "a copy of each token's neighbors, by F.unfold",
    "unsupported",
)


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
    BACKENDS.register(name, _with_valid_hw(name, attend), about, unsupported=unsupported)
    BACKENDS[name].resolve()


def _with_valid_hw(name: str, attend: Callable) -> Callable:
    """`attend`, also if its argument `valid_hw` has the previous name `valid`."""
    parameters = inspect.signature(attend).parameters
    if "valid" not in parameters or "valid_hw" in parameters:
        return attend
    warnings.warn(
        f"backend {name}: the argument valid is now valid_hw", DeprecationWarning, stacklevel=3
    )

    @wraps(attend)
    def renamed(*args: Any, valid_hw: Any, **kwargs: Any) -> Any:
        return attend(*args, valid=valid_hw, **kwargs)

    return renamed
