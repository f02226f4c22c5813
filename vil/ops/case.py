"""The static facts of a call of local attention, by which a backend is chosen or refuses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vil.ops.bias import LocalBias
from vil.ops.window import Window


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
