"""The arguments of local attention as one object, which is passed to backends."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from vil.ops.bias import NO_BIAS, LocalBias
from vil.ops.window import Mask, Window

Gradients = tuple[Tensor | None, ...]  # of q, k, v, the table and to_global


class Call(NamedTuple):
    """The validated arguments of `vil.ops.local_attention`. `scale` is never None."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: Window
    num_global: int = 0
    bias: LocalBias = NO_BIAS
    valid_hw: Tensor | None = None
    scale: float = 1.0
    dropout_p: float = 0.0


def to_numbers(window: Window, num_global: int) -> list[int]:
    """Return the window and the number of global tokens as a flat list, for torch operators."""
    offsets = [step for offset in window.offsets for step in offset]
    return [*window.grid, window.size, int(window.mask), num_global, *offsets]


def from_numbers(numbers: Sequence[int]) -> tuple[Window, int]:
    """Return the window and the number of global tokens from the list of `to_numbers`."""
    rows, cols, size, mask, num_global, *steps = numbers
    offsets = tuple(zip(steps[::2], steps[1::2]))
    return Window((rows, cols), size, Mask(mask), offsets), num_global
