"""The static facts of a call of local attention, by which a backend is chosen or refuses.

Letters: B images, N heads, D channels of a head, G global tokens, w window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vil.ops.bias import LocalBias
from vil.ops.window import KINDS, Window

LARGE_BATCH = 64  # images; from here on time grows as the batch does


@dataclass(frozen=True)
class Case:
    """The static facts that a backend may refuse by; q is (batch, heads, L, head_dim)."""

    window: Window
    batch: int
    heads: int
    head_dim: int
    num_global: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    table_bias: bool = False
    global_bias: bool = False
    valid: bool = False
    dropout: bool = False
    needs_grad: bool = True

    @classmethod
    def of(
        cls,
        q: Tensor,
        window: Window,
        num_global: int,
        bias: LocalBias,
        valid: Tensor | None,
        dropout_p: float,
    ) -> Case:
        """The case of a call with q (B, N, L, D)."""
        return cls(
            window,
            q.shape[0],
            q.shape[1],
            q.shape[3],
            num_global,
            q.dtype,
            q.device.type,
            bias.table is not None,
            bias.to_global is not None,
            valid is not None,
            dropout_p > 0,
            torch.is_grad_enabled(),
        )

    @property
    def symbolic(self) -> bool:
        """Whether torch.export or torch.compile left the batch or the grid open."""
        return self.window.symbolic or isinstance(self.batch, torch.SymInt)

    def bucket(self) -> str:
        """Cases of one bucket share a tuned choice, so that a new image size need not be tuned.

        Batches and sides of many chunks count by powers of two; of the offsets only their number
        counts, so that the eight neighbours of random shift are one bucket.
        """
        window = self.window
        rows, cols = (_coarse(chunks, exact_to=4) for chunks in window.chunks)
        batch = min(_coarse(self.batch), LARGE_BATCH)
        bias = "+".join(
            word
            for word, there in (("table", self.table_bias), ("globals", self.global_bias))
            if there
        )
        words = [
            f"{rows}x{cols} chunks of {window.size}x{window.size} {KINDS[window.exact]}",
            f"{len(window.offsets)} offsets",
            f"B{batch} N{self.heads} D{self.head_dim} G{self.num_global}",
            f"bias {bias or 'none'}",
            f"{self.dtype} {self.device}".removeprefix("torch."),
            *(word for word in ("valid", "dropout") if getattr(self, word)),
            "training" if self.needs_grad else "evaluation",
        ]
        return ", ".join(words)


def _coarse(n: int, exact_to: int = 1) -> int:
    """n, or the next power of two above `exact_to`."""
    return n if n <= exact_to else 1 << (n - 1).bit_length()
