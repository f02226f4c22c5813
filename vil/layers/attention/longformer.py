"""Vision Longformer attention: a local token sees its window and the global tokens.

Source: Vision Longformer, arXiv:2103.15358, sections 3.2 and 3.3.

Letters: B images, N heads, D channels of a head, L local tokens, G global tokens, w window.
"""

import math
import random

import torch
from torch import Tensor

from vil.layers.attention.base import GlobalLocalAttention
from vil.layers.pos_embed import register_relative_bias
from vil.ops import BACKENDS, Case, LocalBias, Window, local_attention
from vil.ops.window import mode_offsets
from vil.utils.lookup import lookup
from vil.utils.train_step import TrainStep


class LongformerAttention(GlobalLocalAttention):
    """Local tokens attend to the window and the global tokens, global tokens to everything.

    window: w, the chunk side.
    sw_exact: 1 exact window, 0 chunks cut at the border, -1 cyclic.
    mode: 0 all nine chunks; -1 the own chunk; above 0 random shift: in training the own chunk and
    one neighbour drawn anew at each step (`set_progress` tells the step), in evaluation all nine.
    mode_switch: the share of epochs after which training too sees all nine chunks.
    rel_pos: a bias by relative position, whose table does not depend on the grid.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window: int,
        grid: tuple[int, int] | None = None,
        sw_exact: int = 0,
        mode: int = 0,
        mode_switch: float = 1.0,
        backend: str = "auto",
        num_global: int = 1,
        rel_pos: bool = False,
        **common,
    ) -> None:
        super().__init__(dim, num_heads, num_global=num_global, rel_pos=rel_pos, **common)
        # refuse what does not fit together now, not in the first forward pass
        Window.from_mode((1, 1), window, sw_exact, mode)
        if backend != "auto":
            lookup(BACKENDS, backend, "backend")
        self.window_size, self.sw_exact, self.backend = window, sw_exact, backend
        self.mode, self.mode_switch = mode, mode_switch
        self.progress: TrainStep | None = None
        self.index = 0
        if rel_pos:
            register_relative_bias(self, (4 * window - 1,) * 2, num_heads, num_global)

    def local_rows(
        self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], valid: Tensor | None
    ) -> Tensor:
        """q (B, N, L, D), k, v (B, N, G+L, D) -> (B, N, L, D)."""
        if self.mode > 0 and self.training and torch.compiler.is_exporting():
            raise ValueError(
                "random shift draws another window at each training step, which no exported "
                "program can: export the model in evaluation, model.eval(), or vil export"
            )
        attend = self.attend_shifted if self.mode > 0 else self.attend
        return attend(q, k, v, grid, valid)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], valid: Tensor | None
    ) -> Tensor:
        """The operation with the window of this moment."""
        return local_attention(
            q,
            k,
            v,
            self.window(grid),
            num_global=self.num_global,
            bias=self.bias(),
            valid=valid,
            scale=self.scale,
            dropout_p=self.attn_drop if self.training else 0.0,
            backend=self.backend,
        )

    @torch.compiler.disable  # each step has another window: compiled, each would be a graph
    def attend_shifted(self, *arguments) -> Tensor:
        """`attend`, left out of what torch.compile makes of the model."""
        return self.attend(*arguments)

    def bias(self) -> LocalBias | None:
        """The learned bias of local rows, or None."""
        if not self.rel_pos:
            return None
        to_global = self.g2l_relative_position_bias[1] if self.num_global else None
        return LocalBias(self.local_relative_position_bias_table.mT, to_global)

    def modes(self) -> tuple[int, ...]:
        """The neighbour modes it may be in: with random shift all of 0 (all nine chunks) to 8."""
        return tuple(range(9)) if self.mode > 0 else (self.mode,)

    def window(self, grid: tuple[int, int], mode: int | None = None) -> Window:
        """Who sees whom in a neighbour mode; by default in the one of this moment."""
        mode = self.current_mode() if mode is None else mode
        return Window.from_mode(grid, self.window_size, self.sw_exact, mode)

    def case(
        self,
        grid: tuple[int, int],
        mode: int,
        *,
        training: bool,
        batch: int,
        dtype: torch.dtype,
        device: str,
        padded: bool = False,
    ) -> Case:
        """What a backend is asked for on this grid in a neighbour mode; padded: images of several
        sizes share a batch."""
        return Case(
            self.window(grid, mode),
            batch,
            self.num_heads,
            self.dim // self.num_heads,
            self.num_global,
            dtype,
            device,
            table_bias=self.rel_pos,
            global_bias=self.rel_pos and self.num_global > 0,
            valid=padded,
            dropout=training and self.attn_drop > 0,
            needs_grad=training,
        )

    def current_mode(self) -> int:
        """The neighbour mode in force: -1, 0, or 1..8."""
        if self.mode <= 0:
            return self.mode
        if not self.training:
            return 0
        if self.progress is None:
            raise RuntimeError(
                "random shift draws a neighbour from the step: call "
                "vil.layers.attention.set_progress(model, TrainStep(...)) before each training step"
            )
        return 0 if self.switched(self.progress) else self.sample_mode()

    def sample_mode(self) -> int:
        """A neighbour 1..8, a function of (seed, step, module): the same when recomputed."""
        draw = random.Random(f"random shift {self.progress.seed} {self.progress.step} {self.index}")
        return draw.randint(1, 8)

    def switched(self, progress: TrainStep) -> bool:
        """Whether random shift is over: from epoch mode_switch * epochs on."""
        return self.mode > 0 and progress.epoch >= self.mode_switch * progress.epochs

    def set_progress(self, progress: TrainStep, index: int) -> str | None:
        """Take note of the step; says so in the step in which random shift ends."""
        self.progress, self.index = progress, index
        first = math.ceil(self.mode_switch * progress.epochs)
        if not self.switched(progress) or progress.step != first * progress.steps_per_epoch:
            return None
        return f"random shift is over, all nine chunks from epoch {first}"

    def local_macs(self, grid: tuple[int, int]) -> int:
        """Scores and values over all chunks of evaluation, as the published counts have it."""
        keys = len(mode_offsets(min(self.mode, 0))) * self.window_size**2 + self.num_global
        return 2 * grid[0] * grid[1] * keys * self.dim

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, window={self.window_size}, "
            f"sw_exact={self.sw_exact}, mode={self.mode}, "
            f"mode_switch={self.mode_switch}, backend={self.backend}"
        )
