"""Plan streamed forward passes, which process an image in strips, for a memory limit.

A plan has the strip height of each block, and whether the tokens of each stage are stored in memory
or on disk. To fit into the limit, the planner reduces the heights of the strips that need the most
memory. If that is not enough, it moves stored tokens to disk, those of the largest stage first.

Shapes: X Y grid of a stage, G global tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vil.layers.attention.full import FullAttention
from vil.models.stage import Stage
from vil.models.vision_longformer import MsViT
from vil.streaming.checks import check_model, count_stages, needs_head, stage_of
from vil.streaming.costs import Cost, StageCosts, embed_height, probe_dtypes, strip_macs
from vil.streaming.local_rows import chunk_side, halo_of, is_cyclic, window_of
from vil.streaming.outputs import map_shapes, output_width
from vil.streaming.plan import StagePlan, StreamPlan, format_bytes
from vil.streaming.tokens import PART_BYTES, part_size
from vil.utils.errors import ConfigError, as_config_error

SLACK = 1 << 16  # bytes of global tokens and running sums


@dataclass(frozen=True)
class StageShape:
    """Properties of a stage's computation that do not depend on the image size.

    stored: whether the stage's tokens are stored between passes.
    num_stored: number of passes that store tokens; 0 if `stored` is False. Each block has one such
    pass, except a last block with local attention. The patch embedding has one if the first block
    has full attention.
    collects: whether the last block's global tokens are needed.
    only_global: whether the last block computes its global tokens only.
    has_full: whether any block has full attention.
    """

    stored: bool
    num_stored: int
    collects: bool
    only_global: bool
    has_full: bool

    @property
    def copies(self) -> int:
        """Number of copies of the stored tokens in memory. It is 2 if any block has full attention,
        because full attention cannot overwrite its input, and 1 otherwise."""
        return 2 if self.has_full else 1


def shape_of(model: MsViT, index: int, outputs: Sequence[str]) -> StageShape:
    """Return the StageShape of stage `index` for a pass that computes `outputs`."""
    stage, spec = model.stages[index], model.specs[index]
    is_last = index == len(model.stages) - 1 and needs_head(outputs)
    full = [isinstance(block.attn, FullAttention) for block in stage.blocks]
    cyclic = any(is_cyclic(window_of(block.attn, (1, 1))) for block in stage.blocks)
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


class Planner:
    """A planner of streamed forward passes, for one model, image size and set of outputs.

    size: (H, W) in pixels. dtype: dtype of the model's input. copies: number of copies of a strip's
    pixels in memory while it is read. given: outputs that are written to arrays of the caller,
    whose memory is not counted. pad: see `vil.streaming.prepare`. Raises ConfigError if the model
    cannot be streamed.
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
        pad: bool = False,
    ) -> None:
        check_model(model, outputs, size, pad=pad)
        self.pad = pad
        self.model, self.size, self.outputs = model, size, outputs
        count = count_stages(model, outputs)
        stages: list[Stage] = list(model.stages[:count])
        self.device = stages[0].embed.proj.weight.device
        self.dtypes = probe_dtypes(stages, model.in_chans, dtype)
        self.grids = model.grids(size, pad=pad)[:count]
        self.shapes = [shape_of(model, i, outputs) for i in range(count)]
        self.stages, cols, cell = [], size[1], model.in_chans * dtype.itemsize
        self.copies = copies + pad  # padding copies the rows
        for stage, grid, dtypes in zip(stages, self.grids, self.dtypes):
            row = max(cols, grid[1] * stage.embed.patch) * cell  # with padding
            self.stages.append(StageCosts(stage, grid, dtypes, self.device, row))
            cols, cell = grid[1], self.stages[-1].token_rows(1) // grid[1]
        self.output_bytes = sum(self._output_bytes(n) for n in outputs if n not in given)

    def dtype_of(self, output: str) -> torch.dtype:
        """Return the dtype of an output."""
        index = stage_of(output)
        return self.dtypes[-1 if index is None else index].tokens

    def _output_bytes(self, name: str) -> int:
        """Return the size of an output in bytes."""
        vector = (output_width(self.model, name),)
        shape = map_shapes(self.model, (name,), self.size, pad=self.pad).get(name, vector)
        return math.prod(shape) * self.dtype_of(name).itemsize

    def store_bytes(self, index: int) -> int:
        """Return the size in bytes of one copy of a stage's stored tokens; 0 if they are not
        stored."""
        stored = self.shapes[index].stored
        return self.stages[index].token_rows(self.grids[index][0]) if stored else 0

    def peaks(self, heights: Sequence[Sequence[int]], on_disk: Sequence[bool]) -> list[int]:
        """Return the peak bytes of each stage's passes and, as the last item, of the final pass.

        The item of a stage without stored tokens is 0, because it has no passes.
        heights: for each stage, the strip heights of its blocks in rows. on_disk: for each stage,
        whether its tokens are stored on disk.
        """
        source, copies, result = Cost(), self.copies, []
        alive = self.output_bytes + SLACK
        for i, (costs, shape) in enumerate(zip(self.stages, self.shapes)):
            read, copies = costs.embed(source, copies), 1 + self.pad
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
        """Return the peak memory, in bytes, of the passes that store the tokens of stage `index`.

        heights: strip height of each block. read: memory cost of computing the output of the patch
        embedding, which the first pass reads.
        """
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
        """Return the bytes that the head needs to normalize and pool tokens of the last stage. The
        head processes a limited number of tokens at once.

        heights: strip heights of the last stage's blocks.
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
        """Return a plan with a maximum strip height: `num_chunks` rows of chunks or, for attention
        without chunks, 8 * num_chunks rows of tokens. The plan's `memory` and `peak_bytes` are 0,
        because no memory is counted. on_disk: whether tokens are stored on disk."""
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
        """Return a plan whose peak is at most `memory` bytes.

        on_disk: store tokens on disk even if they fit into the limit. Raises ConfigError if every
        plan needs more memory. The error states the smallest possible limit, and whether this limit
        needs a scratch folder.
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
        hint = ""
        # all limits were too small for `chosen`, which therefore has the smallest heights
        if not on_disk and max(self.peaks(chosen, [False] * len(self.stages))) > least:
            hint = ", with a folder for tokens: scratch=DIR or --scratch DIR"
        raise ConfigError(
            f"the memory limit {format_bytes(memory)} is too small for "
            f"{self.size[0]} x {self.size[1]} pixels: the smallest possible limit is "
            f"{-(-least // 2**20)} MiB ({least} bytes){hint}"
        )

    def _lower(self, memory: int, on_disk: Sequence[bool]) -> list[list[int]]:
        """Lower the strip heights of the blocks until the plan fits into `memory` bytes, or until
        no height can be lowered. Returns a list per stage, with the strip height of each block.
        """
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
        """Return the strip heights of block `index`, except those that certainly need more than
        `memory` bytes. If all need more, only the smallest height is returned.

        A height is left out too if a larger one needs no more memory. This happens where the
        default backend of small grids needs more than that of larger ones.
        """
        heights = costs.heights(index)
        peaks = [costs.block(index, height, Cost(), False).peak for height in heights]
        useful = [
            h for n, h in enumerate(heights) if peaks[n] < min(peaks[n + 1 :], default=math.inf)
        ]
        return [h for h in useful if 5 * costs.token_rows(h) <= memory] or useful[:1]

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
            attns = [block.attn for block in costs.blocks]
            halos = [max(halo_of(window_of(a, costs.grid))) * chunk_side(a) for a in attns]
            num_barriers = len(costs.blocks) - 1 if self.model.specs[i].num_global else 0
            stages.append(
                StagePlan(
                    name=f"stages.{i}",
                    grid=costs.grid,
                    action=action,
                    num_passes=shape.num_stored + (not shape.has_full or not self._ends_full(i)),
                    num_barriers=max(0, num_barriers) if shape.stored else 0,
                    heights=tuple(heights[i]),
                    halo=max(halos, default=0),
                    store_bytes=copies * self.store_bytes(i),
                    peak_bytes=peaks[i] if i < len(self.stages) - 1 else max(peaks[i:]),
                    macs=macs,
                    whole_macs=whole,
                )
            )
        names = (self.size, self.outputs, memory, max(peaks), self.output_bytes)
        return StreamPlan(*names, tuple(stages), self.pad)

    def _ends_full(self, index: int) -> bool:
        return isinstance(self.stages[index].blocks[-1].attn, FullAttention)

    def _macs(self, index: int, heights: Sequence[int]) -> tuple[int, int]:
        """Return the multiply-accumulates of a stage as two numbers: for a streamed image, and for
        an image that is processed at once."""
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
    """Remove the largest strip height from an ascending list, in place.

    Also remove other heights that cannot fit into the memory limit, but keep at least one height.
    peak: bytes that the largest height needs. memory: limit in bytes.
    """
    # a height is assumed to need at least peak * height / (largest height) bytes
    limit = heights.pop() * memory / peak
    while len(heights) > 1 and heights[-1] > limit:
        heights.pop()
