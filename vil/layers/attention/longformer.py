"""Vision Longformer attention: a local token attends to its 2-D window and the global tokens.

Source: Vision Longformer, arXiv:2103.15358, sections 3.2 and 3.3.

Shapes: B batch, N heads, D head dim, L local tokens, G global tokens, T = G+L, Q queries, w side of
a chunk (the grid is divided into chunks of w x w tokens).
"""

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vil.layers.attention.base import GlobalLocalAttention
from vil.layers.padding import Grid, Valid
from vil.layers.pos_embed import register_relative_bias
from vil.ops import BACKENDS, Case, LocalBias, Window, local_attention
from vil.ops.reference import attended_keys
from vil.ops.small_grid import shrink_case
from vil.ops.window import mode_offsets
from vil.utils.lookup import lookup
from vil.utils.train_step import TrainStep
from vil.utils.transforms import is_exporting


class LongformerAttention(GlobalLocalAttention):
    """Attention of local tokens to a window and the global tokens, and of global tokens to all.

    window: w, the chunk side.
    sw_exact: 1 for keys at most w rows and columns away, 0 for whole chunks, -1 for whole chunks on
    a cyclic grid; see `vil.ops.window.Mask`.
    mode: the chunks that a query attends to. 0: the 3x3 chunks around the query. -1: only the chunk
    that contains the query. Above 0: random shift. In training, it uses the query's chunk and one
    neighbor, sampled at each step (see `set_progress`); in evaluation, all nine chunks.
    mode_switch: the fraction of epochs after which random shift ends.
    backend: "auto", or a name of `vil.ops.BACKENDS`.
    rel_pos: learn a relative position bias, whose table does not depend on the grid.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window: int,
        sw_exact: int = 0,
        mode: int = 0,
        mode_switch: float = 1.0,
        backend: str = "auto",
        **common,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        # raise on invalid settings now, not in the first forward pass
        Window.from_mode((1, 1), window, sw_exact, mode)
        if backend != "auto":
            lookup(BACKENDS, backend, "backend")
        self.window_size, self.sw_exact, self.backend = window, sw_exact, backend
        self.mode, self.mode_switch = mode, mode_switch
        self.progress: TrainStep | None = None
        self.index = 0
        if self.rel_pos:
            register_relative_bias(self, (4 * window - 1,) * 2)

    def attend_local(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """Return the output (B, N, L, D) of local queries q with k, v (B, N, G+L, D).

        Raises ValueError if random shift is exported in training mode.
        """
        if self.mode > 0 and self.training and is_exporting():
            raise ValueError(
                "random shift samples another window at each training step, which cannot be "
                "exported: export the model in evaluation, with model.eval() or vil export"
            )
        attend = self._attend_shifted if self.mode > 0 else self._attend
        return attend(q, k, v, grid, valid_hw)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        dropout_p = self.attn_drop if self.training else 0.0
        options = dict(num_global=self.num_global, bias=self.bias(), valid_hw=valid_hw)
        options |= dict(scale=self.scale, dropout_p=dropout_p, backend=self.backend)
        return local_attention(q, k, v, self.window(grid), **options)

    # random shift changes the window at each step: torch.compile would compile every window
    _attend_shifted = torch.compiler.disable(_attend)

    def bias(self) -> LocalBias | None:
        """Return the learned bias of local queries; None without rel_pos."""
        if not self.rel_pos:
            return None
        to_global = self.g2l_relative_position_bias[1] if self.num_global else None
        return LocalBias(self.local_relative_position_bias_table.mT, to_global)

    def window(self, grid: Grid, mode: int | None = None) -> Window:
        """Return the window for a grid and a mode, by default `current_mode()`."""
        mode = self.current_mode() if mode is None else mode
        return Window.from_mode(grid, self.window_size, self.sw_exact, mode)

    def case(self, grid: Grid, mode: int, *, training: bool, padded: bool = False, **call) -> Case:
        """Return the `Case` of a local attention call. padded: whether it has `valid_hw`.

        mode: see `current_mode`. call: batch, dtype and device.
        """
        case = Case(
            self.window(grid, mode),
            heads=self.num_heads,
            head_dim=self.dim // self.num_heads,
            num_global=self.num_global,
            table_bias=self.rel_pos,
            global_bias=self.rel_pos and self.num_global > 0,
            valid=padded,
            dropout=training and self.attn_drop > 0,
            needs_grad=training,
            **call,
        )
        return shrink_case(case)

    def backend_cases(self, grid: Grid, *, training: bool, **call: Any) -> Iterator[Case]:
        """Yield a case for each kind of call, see `Attention.backend_cases`.

        For random shift, one neighbor represents all eight.
        """
        modes = (0, 1) if self.mode > 0 else (self.mode,)
        for mode in modes if training else ():
            yield self.case(grid, mode, training=True, **call)
        yield self.case(grid, min(self.mode, 0), training=False, **call)

    def current_mode(self) -> int:
        """Return the mode of this forward pass: -1 or 0 (see the class), or 1..8 for one neighbor.

        Raises RuntimeError in training with random shift if `set_progress` was not called.
        """
        if self.mode <= 0:
            return self.mode
        if not self.training:
            return 0
        if self.progress is None:
            raise RuntimeError(
                "random shift samples a neighbor from the training step: call "
                "vil.layers.attention.set_progress(model, TrainStep(...)) before each training "
                "step"
            )
        if self.shift_ended(self.progress):
            return 0
        # depends on (seed, step, module) only: gradient checkpointing recomputes the same mode
        rng = random.Random(f"random shift {self.progress.seed} {self.progress.step} {self.index}")
        return rng.randint(1, 8)

    def shift_ended(self, progress: TrainStep) -> bool:
        """Return whether random shift has ended, which it does at epoch mode_switch * epochs."""
        return self.mode > 0 and progress.epoch >= self.mode_switch * progress.epochs

    def set_progress(self, progress: TrainStep, index: int) -> str | None:
        """Store the training step. Return a log line at the step where random shift ends."""
        self.progress, self.index = progress, index
        first = math.ceil(self.mode_switch * progress.epochs)
        if not self.shift_ended(progress) or progress.step != first * progress.steps_per_epoch:
            return None
        return f"random shift is over, all nine chunks from epoch {first}"

    def local_weights(
        self, q: Tensor, k: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid
    ) -> Tensor:
        """Return the weights (B, N, Q, T) of local queries q (B, N, Q, D) over k (B, N, T, D).

        queries (Q,): indices of the queries among the local tokens.
        """
        scores = self.scores(q, k)
        rows = [
            self._window_weights(scores[:, :, at], grid, query, valid_hw)
            for at, query in enumerate(queries.tolist())
        ]
        return torch.stack(rows, dim=2) if rows else scores

    def _window_weights(self, scores: Tensor, grid: Grid, query: int, valid_hw: Valid) -> Tensor:
        """Convert the scores (B, N, T) of one local token to weights (B, N, T).

        If a key occurs twice in the window, its weights are summed.
        """
        bias, num_global = self.bias(), self.num_global
        local = attended_keys(self.window(grid), *divmod(query, grid[1]))
        row, col, index = torch.tensor(local, device=scores.device).reshape(-1, 3).unbind(1)
        keys = num_global + row * grid[1] + col
        keys = torch.cat([torch.arange(num_global, device=scores.device), keys])
        scores = scores[:, :, keys]
        if bias is not None:
            parts = [bias.table[:, index]]
            if bias.to_global is not None:
                parts.insert(0, bias.to_global)
            scores = scores + torch.cat(parts, dim=-1)
        if valid_hw is not None:
            real = self.real_tokens(valid_hw, grid)[:, keys]
            scores = scores.masked_fill(~real[:, None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        full = weights.new_zeros(*weights.shape[:2], num_global + grid[0] * grid[1])
        return full.index_add(2, keys, weights)

    @property
    def min_export_side(self) -> int:
        """Smallest grid side with more than one chunk."""
        return self.window_size + 1

    def local_macs(self, grid: Grid) -> int:
        """Return the multiply-accumulates of scores and values in evaluation.

        Masked keys of the chunks are included, as in published numbers.
        """
        keys = len(mode_offsets(min(self.mode, 0))) * self.window_size**2 + self.num_global
        return 2 * grid[0] * grid[1] * keys * self.dim

    def extra_repr(self) -> str:
        names = ("sw_exact", "mode", "mode_switch", "backend")
        own = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"{super().extra_repr()}, window={self.window_size}, {own}"
