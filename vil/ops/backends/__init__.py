"""Registry of the backends of local attention, with their modules and limits.

Importing this package imports neither torch nor a backend, so that commands can list the names
quickly.

A backend that recomputes the scores in its backward pass consists of two passes with one interface,
which `vil.ops.custom_op` describes. A forward pass in FORWARDS and another backend's backward pass
in BACKWARDS form a pair, such as "flex+blocked". The tuner measures the pairs of PAIRS. A pair is
found under its name, but is not listed with the backends.
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


class BackendRegistry(Registry[Backend]):
    """Registry of backends that also finds pairs and former names, which it does not list."""

    def __init__(self) -> None:
        super().__init__("backend", entry_type=Backend)
        self.pairs: dict[str, Backend] = {}

    def __getitem__(self, name: str) -> Backend:
        name = FORMER_NAMES.get(name, name)
        return self.entries[name] if name in self.entries else self.pairs[name]


# {device: pairs of a forward and another backend's backward pass that the tuner measures}
PAIRS = {"cuda": ("flex+blocked", "flex+triton", "triton+blocked", "blocked+triton")}
FORMER_NAMES = {"masked_sdpa": "masked"}  # in configs and folders of earlier runs
FORWARDS = Registry("forward pass", entry_type=Implementation)
BACKWARDS = Registry("backward pass", entry_type=Implementation)
BACKENDS = BackendRegistry()
_JOIN = "vil.ops.custom_op:join_passes"


def _pass_facts(forward: str, backward: str) -> dict[str, Any]:
    """Return the facts of a backend that combines two passes."""
    return dict(
        unsupported="vil.ops.custom_op:join_limits",
        prepare="vil.ops.custom_op:join_prepare",
        passes=(forward, backward),
        layouts=True,  # `join_limits` rejects layouts that a pass does not support
    )


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


def _add_passes(name: str, module: str, about: str, **facts: Any) -> None:
    """Add a backend of this package that recomputes the scores, and its two passes.

    module: location, relative to this package, of its functions `forward`, `backward` and
    `unsupported`. facts: see `Implementation`, with locations relative to this package.
    """
    home = f"{__name__}.{module}"
    facts = {key: f"{__name__}.{place}" for key, place in facts.items()}
    for registry, function in ((FORWARDS, "forward"), (BACKWARDS, "backward")):
        limits = f"{home}:unsupported"
        registry.add(name, f"{home}:{function}", about, unsupported=limits, layouts=True, **facts)
    BACKENDS.add(name, _JOIN, about, **_pass_facts(name, name))


_RECOMPUTES = "the backward pass recomputes the scores"
_FLEX = "torch's FlexAttention on tokens in chunk order"
_UNFOLD = "a copy of each token's neighbors, by"
_add("masked", "masked:run", "full attention with a dense mask", "unsupported", layouts=True)
_add("gathered", "gathered:run", "fused attention on gathered neighbor chunks; exportable")
_add_passes("blocked", "blocked", f"a few chunks at a time; {_RECOMPUTES}")
_add_passes("native", "native", f"compiled C++ for CPUs; {_RECOMPUTES}", prepare="native:prepare")
_add_passes("triton", "triton.fused", f"fused Triton kernels; {_RECOMPUTES}")
_add("flex", "flex:run", _FLEX, "run_unsupported", compiles=True, layouts=True)
FORWARDS.add(
    "flex",
    f"{__name__}.flex:forward",
    _FLEX,
    unsupported=f"{__name__}.flex:unsupported",
    layouts=True,
)
_SLIDING = "vil_2021.sliding_chunk"
_add("chunk_autograd", f"{_SLIDING}:run_autograd", "sliding chunks, backward by autograd")
_add("chunk_handgrad", f"{_SLIDING}:run_handgrad", "sliding chunks, hand-written backward")
_add("unfold_tensor", "vil_2021.unfold:run_tensor", f"{_UNFOLD} views", "unsupported")
_add("unfold_nnf", "vil_2021.unfold:run_nnf", f"{_UNFOLD} F.unfold", "unsupported")
BUILT_IN = frozenset(BACKENDS)
for _forward, _backward in itertools.product(FORWARDS, BACKWARDS):
    _pair = f"{_forward}+{_backward}"
    _about = f"forward of {_forward}, backward of {_backward}"
    _facts = _pass_facts(_forward, _backward)
    BACKENDS.pairs[_pair] = Backend(_pair, _JOIN, _about, facts=_facts)


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
