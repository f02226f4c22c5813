"""The static arguments of local attention as numbers, for torch operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vil.ops.window import Mask, Window


@dataclass(frozen=True)
class CallSpec:
    """The window, the number of global tokens and the scale of the scores."""

    window: Window
    num_global: int
    scale: float

    def numbers(self) -> list[int]:
        """Everything except the scale, as a flat list."""
        window = self.window
        offsets = [step for offset in window.offsets for step in offset]
        return [*window.grid, window.size, int(window.mask), self.num_global, *offsets]

    @classmethod
    def of(cls, numbers: Sequence[int], scale: float) -> CallSpec:
        """The reverse of `numbers`."""
        rows, cols, size, mask, num_global, *steps = numbers
        offsets = tuple(zip(steps[::2], steps[1::2]))
        return cls(Window((rows, cols), size, Mask(mask), offsets), num_global, scale)
