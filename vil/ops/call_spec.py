"""What is static of a call of local attention, for operators that take numbers and tensors only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vil.ops.window import Window


@dataclass(frozen=True)
class CallSpec:
    """The window, the number of global tokens and the scale of the scores."""

    window: Window
    num_global: int
    scale: float

    def numbers(self) -> list[int]:
        """All but the scale, in one flat list."""
        window = self.window
        offsets = [step for offset in window.offsets for step in offset]
        return [*window.grid, window.size, window.exact, self.num_global, *offsets]

    @classmethod
    def of(cls, numbers: Sequence[int], scale: float) -> CallSpec:
        """Undo `numbers`."""
        rows, cols, size, exact, num_global, *steps = numbers
        offsets = tuple(zip(steps[::2], steps[1::2]))
        return cls(Window((rows, cols), size, exact, offsets), num_global, scale)
