"""The arguments of local attention as one object, which is passed to backends."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from vil.ops.bias import NO_BIAS, LocalBias
from vil.ops.layout import Layout
from vil.ops.patterns.base import BY_NUMBER, Pattern
from vil.ops.window import Mask, Window, mode_offsets

PATTERN = 2  # stands in `to_numbers` for a layout, where a window has the value of its mask

Gradients = tuple[Tensor | None, ...]  # gradients of q, k, v, the table and to_global


class Call(NamedTuple):
    """The validated arguments of `vil.ops.local_attention`, whose docstring describes them.

    scale: the factor of q @ k^T, never None.
    needs_lse: whether the backward pass needs the log-sum-exp of the scores.
    neighbor: scalar int64 on the CPU, or None. The mode 1 to 8 whose offsets replace those of the
    window when a backend runs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    window: Window | Layout
    num_global: int = 0
    bias: LocalBias = NO_BIAS
    valid_hw: Tensor | None = None
    scale: float = 1.0
    dropout_p: float = 0.0
    needs_lse: bool = True
    neighbor: Tensor | None = None

    def with_offsets(self) -> "Call":
        """Return the call with the offsets that `neighbor` selects. Reads its value."""
        if self.neighbor is None:
            return self
        offsets = mode_offsets(int(self.neighbor))
        # pyrefly: ignore[unexpected-keyword]  # only a call with a Window has `neighbor`
        window = replace(self.window, offsets=offsets)
        return self._replace(window=window, neighbor=None)


def to_numbers(window: Window | Layout, num_global: int) -> list[int]:
    """Encode the window or layout and the number of global tokens as a list of integers.

    Torch operators can take a list of integers, but not a `Window`. `from_numbers` decodes the
    list.
    """
    if isinstance(window, Layout):
        kind, own = PATTERN, [window.pattern.number, *(window.max_reach or ())]
    else:
        kind, own = int(window.mask), [step for offset in window.offsets for step in offset]
    return [*window.grid, window.size, kind, num_global, *own]


def from_numbers(numbers: Sequence[int]) -> tuple[Window | Layout, int]:
    """Decode the list that `to_numbers` returns: (window or layout, number of global tokens)."""
    rows, cols, size, kind, num_global, *own = numbers
    if kind == PATTERN:
        number, *reach = own
        max_reach = (reach[0], reach[1]) if reach else None
        return Layout((rows, cols), size, BY_NUMBER[number], max_reach), num_global
    offsets = tuple(zip(own[::2], own[1::2]))
    return Window((rows, cols), size, Mask(kind), offsets), num_global


def find_pattern(numbers: Sequence[int]) -> Pattern | None:
    """Return the pattern that a list from `to_numbers` encodes, or None if it encodes a window."""
    return BY_NUMBER[numbers[5]] if numbers[3] == PATTERN else None
