"""Row sources: maps of tokens that are read from top to bottom, a few rows at a time.

A source computes its rows in strips that do not depend on the reader. A row therefore has exactly
the same values each time it is read. Readers that need rows again store them in a `RowBuffer`.

Shapes: X Y grid of a source, C channels, G global tokens, n rows of a read.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.layers.patch_embed import PatchEmbed
from vil.layers.pos_embed import AbsoluteEmbedding

Writer = Callable[[int, Tensor], None]  # takes the first row and rows (n, Y, C)


class RowSource:
    """A base class of images and maps of tokens, whose rows are read from top to bottom.

    rows, cols, channels: shape of the map. dtype, device: dtype and device of the rows.
    """

    def __init__(
        self, rows: int, cols: int, channels: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows, self.cols, self.channels = rows, cols, channels
        self.dtype, self.device = dtype, device

    def fill(self, out: Tensor, first: int) -> None:
        """Fill the tensor `out` (rows, columns, channels) with rows of the map, starting with row
        `first`."""
        raise NotImplementedError

    def new(self, count: int) -> Tensor:
        """Return an uninitialized tensor for rows of the map, (count, columns, channels)."""
        shape = (count, self.cols, self.channels)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def read(self, first: int, stop: int) -> Tensor:
        """Return rows `first` to `stop` - 1 of the map, (rows, columns, channels)."""
        out = self.new(stop - first)
        self.fill(out, first)
        return out

    def read_map(self, first: int, stop: int) -> Tensor:
        """Return rows `first` to `stop` - 1 as a map (1, channels, rows, columns)."""
        return self.read(first, stop).permute(2, 0, 1)[None]


class StripRows(RowSource):
    """A base class of sources that compute their rows in strips of `height` rows.

    The last strip may have fewer rows. A subclass defines `compute`. After each computed strip, the
    attribute `on_strip` is called with the number of rows in the strip.
    """

    def __init__(self, *shape, height: int) -> None:
        super().__init__(*shape)
        self.height = height
        self.on_strip: Callable[[int], None] = lambda rows: None
        self._kept: tuple[int, Tensor] | None = None  # (first row, rows) of a partly read strip

    @property
    def num_strips(self) -> int:
        """Number of strips into which the rows are divided."""
        return -(-self.rows // self.height)

    def compute(self, strip: int) -> Tensor:
        """Return a strip (height, columns, channels). The last strip may have fewer rows."""
        raise NotImplementedError

    def next(self, strip: int) -> Tensor:
        """Compute and return a strip, and call `on_strip`."""
        rows = self.compute(strip)
        self.on_strip(len(rows))
        return rows

    def fill(self, out: Tensor, first: int) -> None:
        stop = first + len(out)
        while first < stop:
            start = first // self.height * self.height
            if self._kept is None or self._kept[0] != start:
                self._kept = None
                self._kept = (start, self.next(start // self.height))
            strip = self._kept[1]
            rows = strip[first - start : stop - start]
            out[len(out) - (stop - first) :][: len(rows)] = rows
            first += len(rows)
            if first == start + len(strip):
                self._kept = None
            del strip, rows


class RowBuffer:
    """A buffer for reading overlapping ranges of rows. Each row of the source is read only once."""

    def __init__(self, source: RowSource) -> None:
        self.source = source
        self.first, self.kept = 0, source.new(0)

    def fill(self, out: Tensor, first: int, keep: int) -> None:
        """Fill the tensor `out` (rows, columns, channels) with rows of the source, starting with
        row `first`.

        The rows of `out` from row number `keep` of the source are also stored, so that the next
        call does not read them from the source again.
        """
        stop, known = first + len(out), 0
        if self.first <= first:
            rows = self.kept[first - self.first :][: len(out)]
            out[: len(rows)] = rows
            known = len(rows)
            del rows
        self.kept = self.source.new(0)
        if known < len(out):
            self.source.fill(out[known:], first + known)
        keep = min(max(keep, first), stop)
        self.first, self.kept = keep, out[keep - first :].clone()


class EmbedRows(StripRows):
    """A `RowSource` that computes the local tokens after a stage's patch embedding.

    source: the image or map to embed. Its last rows are not read if they are not part of a patch.
    grid: (X, Y) of the local tokens. Where it needs more rows or columns than the source has, they
    are 0. padded: the grid for which positions are interpolated; its first rows and columns are
    `grid`.
    """

    def __init__(
        self,
        embed: PatchEmbed,
        source: RowSource,
        grid: tuple[int, int],
        dtype: torch.dtype,
        height: int,
        *,
        padded: tuple[int, int],
    ) -> None:
        channels = embed.proj.out_channels
        super().__init__(*grid, channels, dtype, source.device, height=height)
        self.embed, self.source = embed, source
        self.lines = None if embed.position is None else position_lines(embed.position, padded)

    def compute(self, strip: int) -> Tensor:
        first = strip * self.height
        stop, patch = min(first + self.height, self.rows), self.embed.patch
        x = self.source.read_map(first * patch, min(stop * patch, self.source.rows))
        missing = ((stop - first) * patch - x.shape[2], self.cols * patch - x.shape[3])
        if max(missing) > 0:
            x = F.pad(x, (0, max(0, missing[1]), 0, max(0, missing[0])))
        x = self.embed.proj(x)
        tokens = self.embed.norm_embed(x[0].permute(1, 2, 0))  # (n, Y, C)
        del x
        if self.lines is not None:
            down, across = self.lines
            half = self.channels // 2
            position = torch.empty_like(tokens, dtype=down.dtype)
            position[..., :half] = down[first:stop, None]
            position[..., half:] = across[: self.cols]
            tokens = tokens + position
        return tokens

    def global_tokens(self) -> Tensor:
        """Return the global tokens (1, G, C) that enter the first block."""
        tokens = self.embed.cls_token
        if tokens is None:
            return torch.empty(1, 0, self.channels, dtype=self.dtype, device=self.device)
        tokens = tokens.to(torch.promote_types(self.dtype, tokens.dtype))
        if self.embed.position is not None:
            tokens = tokens + self.embed.position.cls_pos_embed
        return tokens.to(self.dtype)


def position_lines(position: AbsoluteEmbedding, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the position embeddings of the rows and the columns of a grid.

    grid: (X, Y). Returns (X, C/2) for the rows and (Y, C/2) for the columns, for C channels.
    """
    lines = zip((position.x_pos_embed, position.y_pos_embed), grid)
    return tuple(position.fit(line, length)[0] for line, length in lines)


class TappedRows(RowSource):
    """A wrapper of a `RowSource`. All rows that are read from it are also passed to `write`."""

    def __init__(self, source: RowSource, write: Writer) -> None:
        super().__init__(source.rows, source.cols, source.channels, source.dtype, source.device)
        self.source, self.write = source, write

    def fill(self, out: Tensor, first: int) -> None:
        self.source.fill(out, first)
        self.write(first, out)


class StoredRows(RowSource):
    """A `RowSource` whose rows are stored in a tensor (rows, columns, channels), in memory or
    mapped from a file. device: device to which the rows are copied when they are read."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        super().__init__(*tensor.shape, tensor.dtype, device)
        self.tensor = tensor

    def fill(self, out: Tensor, first: int) -> None:
        out.copy_(self.tensor[first : first + len(out)])

    def write(self, first: int, rows: Tensor) -> None:
        """Store rows (n, columns, channels) in the tensor, starting at its row `first`."""
        self.tensor[first : first + len(rows)] = rows
