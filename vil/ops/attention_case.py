"""The static properties of a local attention call. They decide which backend computes it.

Shapes: B batch, N heads, D head dim, G global tokens, w window size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.window import Window

LARGE_BATCH = 64  # images; above it, time is proportional to the batch


@dataclass(frozen=True)
class Case:
    """The static properties of a `local_attention` call with q (batch, heads, tokens, head_dim)."""

    window: Window | Layout
    batch: int
    heads: int
    head_dim: int
    num_global: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    table_bias: bool = False  # whether there is a relative position bias table
    global_bias: bool = False  # whether each head has a learned bias toward each global token
    valid: bool = False  # whether `valid_hw` is passed, the size of each image without its padding
    dropout: bool = False  # whether the dropout probability is above 0
    needs_grad: bool = True  # whether autograd is enabled

    @classmethod
    def of(cls, call: Call) -> Case:
        """Return the `Case` that describes a call of `local_attention`."""
        q, _, _, window, num_global, (table, to_global), valid_hw, _, dropout_p, *_ = call
        batch, heads, _, head_dim = q.shape
        sizes = (batch, heads, head_dim, num_global, q.dtype, q.device.type)
        has = (table is not None, to_global is not None, valid_hw is not None, dropout_p > 0)
        return cls(window, *sizes, *has, needs_grad=torch.is_grad_enabled())

    @property
    def is_layout(self) -> bool:
        """Whether the attended keys are defined by a pattern's `Layout` instead of a `Window`."""
        return isinstance(self.window, Layout)

    @property
    def symbolic(self) -> bool:
        """Whether the batch size or a grid side is dynamic in torch.export or torch.compile."""
        return self.window.symbolic or isinstance(self.batch, torch.SymInt)

    def _kind(self) -> str:
        """Describe the window or the pattern in a few words, for the key that `bucket` returns."""
        window = self.window
        if isinstance(window, Layout):
            return f"pattern {window.pattern} ({window.density:.1f} of the chunks)"
        return f"{window.mask.name.lower()}, {len(window.offsets)} offsets"

    def bucket(self) -> str:
        """Return the key of this case in the tuning cache, which stores the fastest backend.

        Similar cases share a key. The batch size is rounded up to a power of two, at most
        LARGE_BATCH. A grid side of more than four chunks is rounded up to a power of two chunks.
        For a window, the key contains how many chunks a query attends to, but not which ones, so
        all steps of random shift share a key. For a layout, it contains the pattern.
        """
        window = self.window
        rows, cols = (next_power_of_2(chunks, exact_to=4) for chunks in window.chunks)
        batch = min(next_power_of_2(self.batch), LARGE_BATCH)
        bias = "+".join(["table"] * self.table_bias + ["globals"] * self.global_bias)
        words = [
            f"{rows}x{cols} chunks of {window.size}x{window.size} {self._kind()}",
            f"B{batch} N{self.heads} D{self.head_dim} G{self.num_global}",
            f"bias {bias or 'none'}",
            f"{self.dtype} {self.device}".removeprefix("torch."),
            *(word for word in ("valid", "dropout") if getattr(self, word)),
            "training" if self.needs_grad else "evaluation",
        ]
        return ", ".join(words)


def next_power_of_2(n: int, exact_to: int = 1) -> int:
    """Return the smallest power of two that is at least n, or n itself if n <= `exact_to`."""
    return n if n <= exact_to else 1 << (n - 1).bit_length()
