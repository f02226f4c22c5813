"""Vision Longformer attention: a local token attends to its 2-D window and the global tokens.

Source: arXiv:2103.15358, sections 3.2 and 3.3.

Shapes: B batch, N heads, D head dim, L local tokens, G global tokens. The grid is divided into
chunks of w x w tokens.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vil.layers.attention import random_shift
from vil.layers.attention.local import AttendedKeys, LocalAttention
from vil.layers.padding import Grid, Valid
from vil.layers.pos_embed import register_relative_bias
from vil.ops import BACKENDS, Case, Window, choose
from vil.ops.reference import attended_keys
from vil.ops.window import mode_offsets
from vil.utils.train_step import TrainStep
from vil.utils.transforms import is_exporting


class LongformerAttention(LocalAttention):
    """Attention of local tokens to a window and global tokens, and of global tokens to all tokens.

    window: w, the side of a chunk in tokens.
    sw_exact: which tokens of the attended chunks are keys. 1: tokens at most w rows and columns
    away. 0: all tokens. -1: all tokens, and the grid wraps around at its borders.
    mode: which chunks a query attends to. 0: the 3x3 chunks around the query. -1: only the query's
    chunk. 1 or more: random shift. In training, the query attends to its chunk and to one neighbor
    chunk, sampled at each step (see `set_progress`). In evaluation, it attends to all nine chunks.
    mode_switch: the fraction of epochs after which mode 0 replaces random shift.
    backend: the implementation of local attention, "auto" or a name in `vil.ops.BACKENDS`.
    rel_pos: learn a relative position bias. The size of its table does not depend on the grid.
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
        **common,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        # raise on invalid settings now, not in the first forward pass
        Window.from_mode((1, 1), window, sw_exact, mode)
        self.window_size, self.sw_exact = window, sw_exact
        self.mode, self.mode_switch = mode, mode_switch
        self.progress: TrainStep | None = None
        self.index = 0
        self.neighbor: Tensor | None = None  # the current mode as a tensor, during random shift
        if self.rel_pos:
            register_relative_bias(self, (4 * window - 1,) * 2)

    def attend_local(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """Return the attention output (B, N, L, D) of local queries q (B, N, L, D).

        k, v (B, N, G+L, D): keys and values of G global tokens, then of the L local tokens. Raises
        ValueError if random shift is exported in training mode.
        """
        if self.mode > 0 and self.training and is_exporting():
            raise ValueError(
                "random shift cannot be exported in training mode, because it samples another "
                "window at each step: call model.eval() before the export, or use vil export"
            )
        if self.neighbor is None or not self.training or not torch.compiler.is_compiling():
            return super().attend_local(q, k, v, grid, valid_hw)
        # the window changes at each step, and torch.compile would compile each window: pass the
        # mode to the backend as a tensor if it is an operator, else do not compile it
        window = self.window(grid, self.mode)
        call = dict(batch=q.shape[0], dtype=q.dtype, device=q.device.type)
        case = self.make_case(window, training=True, padded=valid_hw is not None, **call)
        if not BACKENDS[choose(case, self.backend)].is_operator:
            return self._attend_uncompiled(q, k, v, grid, valid_hw)
        return self.attend(q, k, v, window, self.bias(grid), valid_hw, self.neighbor)

    _attend_uncompiled = torch.compiler.disable(LocalAttention.attend_local)

    def window(self, grid: Grid, mode: int | None = None) -> Window:
        """Return the window that queries attend to on a grid.

        mode: -1, 0 or 1..8, as returned by `current_mode`. By default, the current mode.
        """
        mode = self.current_mode() if mode is None else mode
        return Window.from_mode(grid, self.window_size, self.sw_exact, mode)

    def case(self, grid: Grid, mode: int, *, training: bool, **call: Any) -> Case:
        """Return the `Case` of a local attention call.

        mode: -1, 0 or 1..8, as returned by `current_mode`. training: whether gradients are
        computed. call: batch, dtype, device and padded, see `make_case`.
        """
        return self.make_case(self.window(grid, mode), training=training, **call)

    def backend_cases(self, grid: Grid, *, training: bool, **call: Any) -> Iterator[Case]:
        """Yield the `Case`s of local attention calls, see `Attention.backend_cases`.

        With random shift, a single case stands for all eight neighbor chunks, because they take the
        same time.
        """
        modes = (0, 1) if self.mode > 0 else (self.mode,)
        for mode in modes if training else ():
            yield self.case(grid, mode, training=True, **call)
        yield self.case(grid, min(self.mode, 0), training=False, **call)

    def current_mode(self) -> int:
        """Return which chunks a query attends to in this forward pass, as a number.

        -1: the query's chunk. 0: this chunk and its eight neighbors. 1..8: this chunk and one
        neighbor. Raises RuntimeError in training with random shift if `set_progress` was not
        called.
        """
        if self.mode <= 0:
            return self.mode
        if not self.training:
            return 0
        if torch.compiler.is_compiling() and self.progress is not None:
            return 0  # `neighbor` is None, so random shift has ended
        if self.progress is None:
            raise RuntimeError(
                "random shift needs the current training step to sample a neighbor chunk: call "
                "vil.layers.attention.set_progress(model, TrainStep(...)) before each training "
                "step"
            )
        if random_shift.has_ended(self.progress, self.mode_switch):
            return 0
        return random_shift.sample_neighbor(self.progress, self.index)

    def set_progress(self, progress: TrainStep, index: int) -> str | None:
        """Store the training step. At the first step after random shift has ended, return a message
        to log. At all other steps, return None.

        index: position of this module among the attention modules of the model.
        """
        self.progress, self.index = progress, index
        if self.mode <= 0:
            return None
        has_ended = random_shift.has_ended(progress, self.mode_switch)
        self.neighbor = None if has_ended else torch.tensor(self.current_mode())
        return random_shift.describe_end(progress, self.mode_switch)

    def attended(self, grid: Grid, query: int) -> AttendedKeys:
        """Return the local keys of one local query. query: its index among the local tokens."""
        local = attended_keys(self.window(grid), *divmod(query, grid[1]))
        row, col, entries = torch.tensor(local).reshape(-1, 3).unbind(1)
        visible = torch.ones(1, len(local), dtype=torch.bool)
        return AttendedKeys(row * grid[1] + col, entries, visible)

    @property
    def min_export_side(self) -> int:
        """Smallest grid side, in tokens, that torch.export can trace with a dynamic size.

        It is the smallest side with two chunks, because torch.export treats a dimension of size 1
        as constant.
        """
        return self.window_size + 1

    def local_macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates of the attention of local queries in evaluation.

        All keys of the attended chunks are counted, including masked keys, as in the numbers that
        were published for Vision Longformer.
        """
        keys = len(mode_offsets(min(self.mode, 0))) * self.window_size**2 + self.num_global
        return 2 * grid[0] * grid[1] * keys * self.dim

    def extra_repr(self) -> str:
        names = ("sw_exact", "mode", "mode_switch", "backend")
        own = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"{super().extra_repr()}, window={self.window_size}, {own}"
