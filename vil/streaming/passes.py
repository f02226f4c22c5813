"""Run the passes of a plan. Each pass goes over the image from top to bottom, strip by strip.

A stage whose tokens are stored has one or more passes, each of which stores the output of a block
or of the patch embedding. The rows of other stages are computed when a pass of a later stage reads
them. The final pass reads the last stage.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vil.layers.attention.full import FullAttention
from vil.layers.block import Block
from vil.models.vision_longformer import MsViT
from vil.streaming.checks import padded_grid
from vil.streaming.costs import Dtypes, embed_height, strip_macs
from vil.streaming.full_rows import FullRows
from vil.streaming.global_rows import GlobalRows
from vil.streaming.heads import Head
from vil.streaming.journal import Journal
from vil.streaming.local_rows import LocalRows
from vil.streaming.plan import StreamPlan
from vil.streaming.planner import StageShape
from vil.streaming.progress import Report, WorkDone, block_work, embed_work
from vil.streaming.rows import EmbedRows, RowSource, StoredRows, StripRows, TappedRows, Writer
from vil.streaming.store import Stores
from vil.streaming.tokens import part_size


class Passes:
    """A streamed forward pass, which consists of several passes over the image.

    shapes, dtypes: one item per stage, from the planner. writers: {index of a stage: function that
    writes rows of the stage's map}. head: computes the logits and pooled features; None if they are
    not requested. journal: record from which interrupted passes resume. progress: called with the
    fraction of the work that is done.
    """

    def __init__(
        self,
        model: MsViT,
        plan: StreamPlan,
        shapes: Sequence[StageShape],
        dtypes: Sequence[Dtypes],
        *,
        writers: Mapping[int, Writer],
        head: Head | None,
        stores: Stores,
        journal: Journal,
        progress: Report,
    ) -> None:
        self.model, self.plan, self.shapes, self.dtypes = model, plan, shapes, dtypes
        self.writers, self.head, self.stores = writers, head, stores
        self.journal = journal
        self.number = 0  # of the current pass
        self.taps: list[tuple[TappedRows, int]] = []  # and the number of rows the next stage reads
        total = sum(self._embed_work(i) for i in range(len(plan.stages)))
        total += sum(
            self._work(i, b)
            for i in range(len(plan.stages))
            for b in range(len(model.stages[i].blocks))
        )
        self.work = WorkDone(total, progress)
        self.collect: GlobalRows | None = None  # global tokens of the last block, for the head

    def run(self, image: RowSource) -> None:
        """Read the image once and write all outputs."""
        source, x_global = image, None
        for index in range(len(self.plan.stages)):
            source, x_global = self._add_stage(index, source)
        self._final_pass(source, x_global)
        self.work.finish_pass()

    def _add_stage(self, index: int, source: RowSource) -> tuple[RowSource, Tensor]:
        """Build the `RowSource` of a stage's output, and run the passes that store its tokens.

        source: rows of the stage's input. Returns (rows of the output, global tokens). If the last
        block has full attention, the global tokens are its output. Otherwise, they are its input.
        """
        stage, shape, plan = self.model.stages[index], self.shapes[index], self.plan.stages[index]
        height = embed_height(stage)
        padded = padded_grid(self.model, index, plan.grid) if self.plan.pad else plan.grid
        rows = EmbedRows(
            stage.embed, source, plan.grid, self.dtypes[index].embedded, height, padded=padded
        )
        x_global, first = rows.global_tokens(), 0
        self.work.watch(rows, self._embed_work(index))
        if shape.stored:
            rows, x_global = self._store(index, rows, x_global)
            first = len(stage.blocks) - (not _is_full(stage.blocks[-1]))
        for b in range(first, len(stage.blocks)):
            is_last = b == len(stage.blocks) - 1
            if shape.collects and is_last:
                self.collect = GlobalRows(stage.blocks[b], x_global)
                if shape.only_global:
                    break
            rows = self._local(index, b, rows, x_global, self.collect if is_last else None)
        if index in self.writers:
            rows = TappedRows(rows, self.writers[index])
            self.taps.append((rows, self._rows_read(index)))
        return rows, x_global

    def _rows_read(self, index: int) -> int:
        """Return the number of rows of a stage's map that the next stage reads; for the last stage,
        all rows."""
        if index == len(self.plan.stages) - 1:
            return self.plan.stages[index].grid[0]
        below = self.model.stages[index + 1]
        return self.plan.stages[index + 1].grid[0] * below.embed.patch

    def _embed_work(self, index: int) -> float:
        return embed_work(self.model.stages[index].embed, self.plan.stages[index].grid)

    def _work(self, index: int, b: int) -> float:
        """Return the estimated work of block `b` of stage `index`, in multiply-accumulates."""
        plan, shape = self.plan.stages[index], self.shapes[index]
        blocks = self.model.stages[index].blocks
        only = shape.only_global and b == len(blocks) - 1
        macs = strip_macs(blocks[b], plan.grid, plan.heights[b], only_global=only)
        return block_work(blocks[b], plan.grid, macs, only_global=only)

    def _local(
        self,
        index: int,
        block: int,
        source: RowSource,
        x_global: Tensor,
        collect: GlobalRows | None,
    ) -> LocalRows:
        module = self.model.stages[index].blocks[block]
        rows = LocalRows(
            module,
            source,
            x_global,
            height=self.plan.stages[index].heights[block],
            dtype=self.dtypes[index].tokens,
            collect=collect,
        )
        self.work.watch(rows, self._work(index, block))
        return rows

    def _store(self, index: int, rows: RowSource, x_global: Tensor) -> tuple[StoredRows, Tensor]:
        """Run the passes that store the tokens of a stage. Returns (stored rows, global tokens)."""
        stage, plan = self.model.stages[index], self.plan.stages[index]
        stores = self.stores.make(index, plan, rows.channels, self.dtypes[index].tokens)
        blocks: list[tuple[int, Block] | None] = list(enumerate(stage.blocks))
        if not _is_full(stage.blocks[-1]):
            blocks.pop()
        if _is_full(stage.blocks[0]):
            blocks.insert(0, None)
        for step, each in enumerate(blocks):
            target = stores[step % len(stores)]
            reader, collect = rows, None
            if each is not None:
                if _is_full(each[1]):
                    options = dict(height=plan.heights[each[0]], dtype=target.dtype)
                    reader = FullRows(each[1], rows, x_global, **options)
                    self.work.watch(reader, self._work(index, each[0]))
                else:
                    collect = GlobalRows(each[1], x_global) if x_global.shape[1] else None
                    reader = self._local(index, each[0], rows, x_global, collect)
            x_global = self._run_pass(reader, target.write, x_global, collect)
            rows = target
        return rows, x_global

    def _run_pass(
        self,
        reader: StripRows,
        write: Writer,
        x_global: Tensor,
        collect: GlobalRows | None,
    ) -> Tensor:
        """Run one pass: read all strips of `reader`, and write them with `write`. Returns the
        global tokens after the block of this pass.

        A pass that an earlier process completed is skipped. A pass that an earlier process started
        is resumed.
        """
        state = self.journal.state_of(self.number)
        if state is None or state["strip"] is not None:
            self._write_strips(reader, write, collect, state)
            if isinstance(reader, FullRows):
                x_global = reader.global_tokens
            elif collect is not None:
                x_global = collect.finish()
            self._flush_taps()
            self.journal.complete(self.number, {"strip": None, "x_global": x_global})
        else:
            x_global = state["x_global"].to(x_global.device)
            self.work.resume(self.work.planned)
        self.taps.clear()
        self.number += 1
        self.work.finish_pass()
        return x_global

    def _write_strips(
        self,
        reader: StripRows,
        write: Writer,
        collect: GlobalRows | None,
        state: Mapping[str, Any] | None,
        pooled: Head | None = None,
    ) -> None:
        first = 0
        if state is not None:
            first = state["strip"]
            self.work.resume(self.work.planned * first / reader.num_strips)
            if collect is not None:
                collect.softmax.restore(state["softmax"])
            if pooled is not None:
                pooled.restore(state["pooled"])
            if isinstance(reader, FullRows):
                reader.global_tokens = state["x_global"].to(reader.device)
        for strip in range(first, reader.num_strips):
            rows = reader.next(strip)
            write(strip * reader.height, rows)
            del rows

            def describe(strip: int = strip) -> dict[str, Any]:
                return {
                    "strip": strip + 1,
                    "softmax": None if collect is None else collect.softmax.state(),
                    "pooled": None if pooled is None else pooled.state(),
                    "x_global": reader.global_tokens if isinstance(reader, FullRows) else None,
                }

            self.journal.save(self.number, describe)

    def _flush_taps(self) -> None:
        """Write the last rows of stage maps. No pass has read these rows, because they do not fill
        a patch of the next stage."""
        for tap, read in reversed(self.taps):
            height = embed_height(self.model.stages[0])
            for first in range(read, tap.rows, height):
                tap.read(first, min(first + height, tap.rows))

    def _final_pass(self, source: RowSource, x_global: Tensor) -> None:
        """Read all rows of the last stage, to write its map and to compute the head's outputs."""
        state = self.journal.state_of(self.number)
        last = len(self.plan.stages) - 1
        head, collect = self.head, self.collect
        only_global = self.shapes[last].only_global
        reader = Whole(source, embed_height(self.model.stages[last]))
        write: Writer = lambda first, rows: None  # noqa: E731
        if only_global:
            self.work.watch(reader, self._work(last, len(self.model.stages[last].blocks) - 1))
            size = part_size(source.channels, source.dtype)
            write = lambda first, rows: collect.add(rows.flatten(0, 1), size)  # noqa: E731
        elif head is not None:
            write = head.add
        self._write_strips(reader, write, collect, state, head)
        if collect is not None:
            x_global = collect.finish()
        if head is not None:
            head.finish(x_global)
        self._flush_taps()


class Whole(StripRows):
    """A reader of all rows of a `RowSource`, for the final pass.

    If the source computes its rows in strips, the reader reads these strips. Otherwise, it reads
    strips of `height` rows.
    """

    def __init__(self, source: RowSource, height: int) -> None:
        shape = (source.rows, source.cols, source.channels, source.dtype, source.device)
        below = source
        while isinstance(below, TappedRows):
            below = below.source
        is_computed = isinstance(below, StripRows)
        super().__init__(*shape, height=below.height if is_computed else height)
        self.source, self.below = source, below if is_computed else None

    def compute(self, strip: int) -> Tensor:
        first = strip * self.height
        if self.below is None:
            return self.source.read(first, min(first + self.height, self.rows))
        rows = self.below.next(strip)
        if isinstance(self.source, TappedRows):
            self.source.write(first, rows)
        return rows


def _is_full(block: Block) -> bool:
    return isinstance(block.attn, FullAttention)
