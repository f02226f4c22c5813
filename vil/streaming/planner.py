"""Choose the strips of each stage, and where its tokens are stored, for a limit of memory.

Without a limit a stage would have the highest strips. The planner lowers the strips that need most
until everything fits, then moves stored tokens to disk, the largest first.

Shapes: X Y grid of a stage, G global tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vil.layers.attention.full import FullAttention
from vil.models.stage import Stage
from vil.models.vision_longformer import MsViT
from vil.streaming.checks import check_model, count_stages, needs_head
from vil.streaming.costs import Cost, StageCosts, embed_height, probe_dtypes, strip_macs
from vil.streaming.local_rows import chunk_side, halo_of, window_of
from vil.streaming.plan import StagePlan, StreamPlan, format_bytes
from vil.streaming.tokens import PART_BYTES, part_size
from vil.utils.errors import ConfigError, as_config_error

SLACK = 1 << 16  # bytes of global tokens and running sums


@dataclass(frozen=True)
class StageShape:
    """What a stage does, apart from sizes.

    stored: its tokens are stored between passes. num_stored: passes that write them, one per block
    and, before a block of full attention, one for the embedding. collects: the last block's global
    tokens are needed. only_global: nothing else of the last block is needed.
    """

    stored: bool
    num_stored: int
    collects: bool
    only_global: bool
    has_full: bool

    @property
    def copies(self) -> int:
        """Copies of the stored tokens in memory: full attention cannot replace them in place."""
        return 2 if self.has_full else 1


def shape_of(model: MsViT, index: int, outputs: Sequence[str]) -> StageShape:
    """Return what stage `index` does for these outputs."""
    stage, spec = model.stages[index], model.specs[index]
    is_last = index == len(model.stages) - 1 and needs_head(outputs)
    full = [isinstance(block.attn, FullAttention) for block in stage.blocks]
    cyclic = any(is_cyclic(block.attn) for block in stage.blocks)
    stored = any(full) or (len(full) > 1 and (spec.num_global > 0 or cyclic))
    collects = is_last and spec.num_global > 0
    only = (
        collects
        and model.global_pool == "token"
        and len(full) > 0
        and not full[-1]
        and f"stages.{index}" not in outputs
    )
    num_stored = (len(full) if full[-1] else len(full) - 1) + full[0] if stored else 0
    return StageShape(stored, num_stored, collects, only, any(full))


def is_cyclic(attn: torch.nn.Module) -> bool:
    """Return whether the window of an attention wraps around."""
    window = None if isinstance(attn, FullAttention) else window_of(attn, (1, 1))
    return window is not None and window.cyclic


class Planner:
    """Costs of streaming a model for one image size and one set of outputs.

    dtype: of the image's strips. copies: how often the pixels of a strip are held while it is read,
    0 if they are a part of the image. given: outputs that the caller has arrays for. Raises
    ConfigError if the model does not stream.
    """

    def __init__(
        self,
        model: MsViT,
        size: tuple[int, int],
        outputs: tuple[str, ...],
        *,
        dtype: torch.dtype,
        copies: int = 1,
        given: Sequence[str] = (),
    ) -> None:
        check_model(model, outputs, size)
        self.model, self.size, self.outputs = model, size, outputs
        count = count_stages(model, outputs)
        stages: list[Stage] = list(model.stages[:count])
        self.device = stages[0].embed.proj.weight.device
        self.dtypes = probe_dtypes(stages, model.in_chans, dtype)
        self.grids = model.grids(size)[:count]
        self.shapes = [shape_of(model, i, outputs) for i in range(count)]
        self.stages, row = [], size[1] * model.in_chans * dtype.itemsize
        self.copies = copies
        for stage, grid, dtypes in zip(stages, self.grids, self.dtypes):
            self.stages.append(StageCosts(stage, grid, dtypes, self.device, row))
            row = self.stages[-1].token_rows(1)
        self.output_bytes = sum(self._output_bytes(n) for n in outputs if n not in given)

    def _output_bytes(self, name: str) -> int:
        """Return the bytes of an output."""
        (rows, cols), dtypes = self.grids[-1], self.dtypes[-1]
        if name.startswith("stages."):
            index = int(name.rpartition(".")[2])
            return self.stages[index].token_rows(self.grids[index][0])
        width = self.model.num_features
        if name == "logits" and self.model.num_classes:
            width = self.model.num_classes
        return width * dtypes.tokens.itemsize * (1 if self.model.global_pool else rows * cols)

    def store_bytes(self, index: int) -> int:
        """Return the bytes of one copy of a stage's tokens; 0 if they are not stored."""
        stored = self.shapes[index].stored
        return self.stages[index].token_rows(self.grids[index][0]) if stored else 0

    def peaks(self, heights: Sequence[Sequence[int]], on_disk: Sequence[bool]) -> list[int]:
        """Return the peak bytes of the passes of each stage, and of the final pass as the last one.

        heights: rows of the strips of each block, by stage.
        """
        source, copies, result = Cost(), self.copies, []
        alive = self.output_bytes + SLACK
        for i, (costs, shape) in enumerate(zip(self.stages, self.shapes)):
            read, copies = costs.embed(source, copies), 1
            own = 0 if on_disk[i] else shape.copies * self.store_bytes(i)
            num_blocks = len(costs.blocks)
            if not shape.stored:
                for b in range(num_blocks):
                    collects = shape.collects and b == num_blocks - 1
                    if shape.only_global and b == num_blocks - 1:
                        read = costs.collect(b, read)
                    else:
                        read = costs.block(b, heights[i][b], read, collects)
                source = read
                result.append(0)
                continue
            peak = alive + own + self._stored_peak(i, heights[i], read)
            alive, source = self.output_bytes + SLACK + own, Cost()
            last = num_blocks - 1
            if shape.only_global:
                source = costs.collect(last, source)
            elif not isinstance(costs.blocks[last].attn, FullAttention):
                source = costs.block(last, heights[i][last], source, shape.collects)
            result.append(peak)
        return [*result, alive + source.peak + self._final_bytes(heights[-1])]

    def _stored_peak(self, index: int, heights: Sequence[int], read: Cost) -> int:
        """Return the most bytes of a pass that writes the tokens of a stage."""
        costs, shape = self.stages[index], self.shapes[index]
        peaks, source = [], read
        if isinstance(costs.blocks[0].attn, FullAttention):
            peaks, source = [read.peak], Cost()
        for b in range(shape.num_stored - len(peaks)):
            collects = self.model.specs[index].num_global > 0
            peaks.append(costs.block(b, heights[b], source, collects).peak)
            source = Cost()
        return max(peaks)

    def _final_bytes(self, heights: Sequence[int]) -> int:
        """Return the bytes of a part of the last stage's tokens while it is normed and pooled.

        heights: of the strips of its blocks.
        """
        if not needs_head(self.outputs) or self.shapes[-1].only_global:
            return 0
        costs, width = self.stages[-1], self.model.num_features
        part = part_size(max(width, self.model.num_classes), costs.dtypes.tokens)
        is_stored = not costs.blocks or self._ends_full(len(self.stages) - 1)
        height = embed_height(costs.stage) if is_stored else heights[-1]
        rows = min(part, min(height, costs.grid[0]) * costs.grid[1])
        return min(PART_BYTES, rows * width * 20)

    def with_strips(self, num_chunks: int, *, on_disk: bool = False) -> StreamPlan:
        """Return the plan whose strips have at most `num_chunks` rows of chunks, or rows of tokens
        in full attention. Its bytes are not counted, but 0. on_disk: where tokens are stored."""
        heights = [
            [
                min(num_chunks * chunk_side(block.attn), costs.heights(b)[-1])
                for b, block in enumerate(costs.blocks)
            ]
            for costs in self.stages
        ]
        count = len(self.stages)
        return self._plan(0, heights, [on_disk] * count, [0] * (count + 1))

    @torch.no_grad()
    @as_config_error
    def choose(self, memory: int, *, on_disk: bool = False) -> StreamPlan:
        """Return the plan for a limit in bytes.

        on_disk: store tokens on disk even if they fit into the limit. Raises ConfigError if no plan
        needs less, with the least that one does.
        """
        order = sorted(
            (i for i in range(len(self.stages)) if self.shapes[i].stored),
            key=lambda i: -self.store_bytes(i),
        )
        least = None
        for count in range(len(order) if on_disk else 0, len(order) + 1):
            moved = [i in order[:count] for i in range(len(self.stages))]
            kept = (self.shapes[i].copies * self.store_bytes(i) for i in order[count:])
            if sum(kept) > memory:
                continue
            chosen = self._lower(memory, moved)
            peaks = self.peaks(chosen, moved)
            least = max(peaks) if least is None else min(least, max(peaks))
            if max(peaks) <= memory:
                return self._plan(memory, chosen, moved, peaks)
        raise ConfigError(
            f"memory {format_bytes(memory)} is too little for {self.size[0]} x {self.size[1]} "
            f"pixels: the least that works is {format_bytes_up(least)} ({least} bytes)"
        )

    def _lower(self, memory: int, on_disk: Sequence[bool]) -> list[list[int]]:
        """Return the highest strips that fit, or the lowest ones if none do."""
        options = [
            [self._allowed(costs, b, memory) for b in range(len(costs.blocks))]
            for costs in self.stages
        ]
        while max(self.peaks([[o[-1] for o in stage] for stage in options], on_disk)) > memory:
            high = [
                (costs.block(b, options[i][b][-1], Cost(), False).peak, i, b)
                for i, costs in enumerate(self.stages)
                for b in range(len(costs.blocks))
                if len(options[i][b]) > 1
            ]
            if not high:
                break
            most = max(high)[0]
            for peak, i, b in high:  # blocks of equal strips together
                if peak == most:
                    lower_option(options[i][b], peak, memory)
        return [[o[-1] for o in stage] for stage in options]

    def _allowed(self, costs: StageCosts, index: int, memory: int) -> list[int]:
        """Return the heights of a block's strips, without those that are surely too high."""
        heights = costs.heights(index)
        return [h for h in heights if 5 * costs.token_rows(h) <= memory] or heights[:1]

    def _plan(
        self,
        memory: int,
        heights: Sequence[Sequence[int]],
        on_disk: Sequence[bool],
        peaks: Sequence[int],
    ) -> StreamPlan:
        stages = []
        for i, (costs, shape) in enumerate(zip(self.stages, self.shapes)):
            action = ("scratch" if on_disk[i] else "memory") if shape.stored else "recompute"
            copies = min(2, shape.num_stored) if on_disk[i] else shape.copies
            macs, whole = self._macs(i, heights[i])
            num_barriers = len(costs.blocks) - 1 if self.model.specs[i].num_global else 0
            stages.append(
                StagePlan(
                    name=f"stages.{i}",
                    grid=costs.grid,
                    action=action,
                    num_passes=shape.num_stored + (not shape.has_full or not self._ends_full(i)),
                    num_barriers=max(0, num_barriers) if shape.stored else 0,
                    heights=tuple(heights[i]),
                    halo=max((_halo(b.attn, costs.grid) for b in costs.blocks), default=0),
                    store_bytes=copies * self.store_bytes(i),
                    peak_bytes=peaks[i] if i < len(self.stages) - 1 else max(peaks[i:]),
                    macs=macs,
                    whole_macs=whole,
                )
            )
        names = (self.size, self.outputs, memory, max(peaks), self.output_bytes)
        return StreamPlan(*names, tuple(stages))

    def _ends_full(self, index: int) -> bool:
        return isinstance(self.stages[index].blocks[-1].attn, FullAttention)

    def _macs(self, index: int, heights: Sequence[int]) -> tuple[int, int]:
        """Return the multiply-accumulates of a stage, streamed and of the whole image."""
        costs, shape = self.stages[index], self.shapes[index]
        first = costs.stage.embed.macs(costs.grid)
        whole = first + sum(block.macs(costs.grid) for block in costs.blocks)
        last = len(costs.blocks) - 1
        macs = first + sum(
            strip_macs(block, costs.grid, heights[b], only_global=shape.only_global and b == last)
            for b, block in enumerate(costs.blocks)
        )
        return macs, whole


def lower_option(heights: list[int], peak: int, memory: int) -> None:
    """Remove the highest of some heights, and others that surely need more than the limit.

    peak: the bytes of the highest. A strip of a share of its height needs at least that share.
    """
    limit = heights.pop() * memory / peak
    while len(heights) > 1 and heights[-1] > limit:
        heights.pop()


def _halo(attn: torch.nn.Module, grid: tuple[int, int]) -> int:
    if isinstance(attn, FullAttention):
        return 0
    return max(halo_of(window_of(attn, grid))) * chunk_side(attn)


def format_bytes_up(size: int) -> str:
    """Return a size as text that is not below it, to be given as a limit."""
    mib = -(-size // 2**20)
    return f"{mib} MiB"
