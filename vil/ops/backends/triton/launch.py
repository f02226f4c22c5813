"""Launch the Triton kernels: block sizes, shared arguments, the rectangles of a window.

The kernels are imported at the first call, so that this file does not need Triton. With
TRITON_INTERPRET=1 in the environment before Triton is imported, they run on the CPU, slowly.

Shapes: B batch, N heads, L tokens, D head dim.
"""

import os
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.attention_case import next_power_of_2
from vil.ops.backends.triton.launches import find_launch
from vil.ops.backends.triton.layouts import make_lists
from vil.ops.backends.triton.tables import base_2, make_table
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.window import Window

PROGRAMS = 1024  # programs that fill a large GPU, for kernels that can split their sums
TILE_SHARE = 16  # tiles of scores take at most 1/16 of the bytes of the other tensors
# bias table entries of a program, and tile rows that it reads at a time, in the kernels that sum
# tiles
ENTRIES, LINES = 128, 16

Rectangle = tuple[int, int, int, int]  # first row, end row, first column, end column


class Tokens(NamedTuple):
    """A tensor (B, N, L, D) as a kernel argument: its pointer and strides."""

    at: Tensor
    image: int
    head: int
    token: int
    channel: int

    @classmethod
    def of(cls, x: Tensor) -> "Tokens":
        return cls(x, *x.stride())


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def current_target() -> str:
    """Return the architecture of the current GPU, such as "sm_90" or "gfx942".

    Returns "sm_80" if kernels run in Triton's interpreter.
    """
    if interpreted():
        return "sm_80"
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else target.arch


@lru_cache(maxsize=1)
def kernels() -> SimpleNamespace:
    """Import the kernels and their helper functions. Returns them as one namespace."""
    if interpreted():
        from vil.ops.backends.triton.interpreter import repair

        repair()
    from vil.ops.backends.triton import backward, forward, layout_bias

    return SimpleNamespace(**(vars(forward) | vars(backward) | vars(layout_bias)))


class Launcher:
    """Launches the kernels of a call with their common arguments: sizes, biases and options."""

    def __init__(self, call: Call) -> None:
        q, valid_hw = call.q, call.valid_hw
        self.window, self.scale, self.num_global = call.window, call.scale, call.num_global
        self.images, self.heads, self.length, self.channels = q.shape
        self.device, self.bytes = q.device, q.numel() * q.itemsize
        table, to_global = call.bias
        self.table, self.reach = make_table(call.window, table)
        self.to_global = base_2(to_global)
        self.valid_hw = (
            None if valid_hw is None else valid_hw.to(q.device, torch.int64).contiguous()
        )
        self.padded = max(16, next_power_of_2(self.channels))
        self.itemsize = q.itemsize
        self.global_block = max(16, next_power_of_2(self.num_global)) if self.num_global else 0

    def options(self, kernel: str, owned: str) -> dict[str, int]:
        """Return the constexpr arguments and launch options of a kernel, as keyword arguments.

        kernel: name of the kernel without the suffix "_kernel". owned: "queries" if each program
        computes a block of queries and loops over blocks of keys, "keys" for the reverse.
        """
        launch = find_launch(current_target(), kernel, self.padded, self.itemsize)
        window = self.window
        is_layout = isinstance(window, Layout)
        cells = window.tile if is_layout else max(map(area, rectangles(window)))
        own, walked = (max(16, next_power_of_2(n)) for n in (window.tile, cells))
        owns_queries = owned == "queries"
        return {
            "D": self.channels,
            "D_PAD": self.padded,
            "Q": min(launch.queries, own if owns_queries else walked),
            "K": min(launch.keys, walked if owns_queries else own),
            **launch.options(),
        }

    def by_chunk(self, name: str, owned: str, *tensors, **constants) -> None:
        """Launch a kernel with one program per image, head, chunk, and block of queries or keys.

        name: name of the kernel without the suffix "_kernel". owned: "queries" if each program
        computes a block of queries and loops over blocks of keys, "keys" for the reverse. tensors,
        constants: further arguments of the kernel.
        """
        kernel = getattr(kernels(), f"{name}_kernel")
        options, window = self.options(name, owned), self.window
        parts = -(-window.tile // options["Q" if owned == "queries" else "K"])
        rects, lists, num_rects = self._loop_arguments(mirrored=owned == "keys")
        kernel[(self.images * self.heads * window.chunks[0] * window.chunks[1] * parts,)](
            *tensors, rects, lists,
            num_rects, self.heads, *window.grid, window.size, self.num_global, parts, *self.reach,
            self.scale,
            MASK=0 if rects is None else int(window.mask), **options, **constants,
        )  # fmt: skip

    def _loop_arguments(self, mirrored: bool) -> tuple:
        """Return the kernel arguments that define what a program loops over.

        They are (RECTS, lists, num_rects). For a layout, RECTS and num_rects are None. For a
        window, `lists` is None.
        mirrored: False if programs compute queries and loop over keys, True for the reverse.
        """
        if isinstance(self.window, Layout):
            lists = make_lists(self.window, self.device, mirrored)
            return None, lists, None
        rects = rectangles(self.window, mirrored)
        return on_device(rects, self.device), None, len(rects)


def rectangles(window: Window, mirrored: bool = False) -> tuple[Rectangle, ...]:
    """Return rectangles that contain all tokens to which the queries of a chunk attend.

    There is a single rectangle if possible, else one for each chunk offset. Rows and columns are
    relative to the chunk's first token, and the ends are exclusive.
    mirrored: return rectangles that contain all tokens whose queries attend to the chunk.
    """
    w, offsets = window.size, window.offsets
    rows, cols = ({offset[axis] for offset in offsets} for axis in (0, 1))
    if len(offsets) == len(rows) * len(cols):  # without gaps, since (0, 0) is among them
        edges = [(min(rows), max(rows) + 1, min(cols), max(cols) + 1)]
    else:
        edges = [(dx, dx + 1, dy, dy + 1) for dx, dy in offsets]
    if mirrored:
        edges = [(1 - b, 1 - a, 1 - d, 1 - c) for a, b, c, d in edges]
    return tuple(tuple(w * edge for edge in rect) for rect in edges)


def area(rect: Rectangle) -> int:
    """Return the number of tokens in a rectangle."""
    return (rect[1] - rect[0]) * (rect[3] - rect[2])


@lru_cache(maxsize=256)
def on_device(rects: tuple[Rectangle, ...], device: torch.device) -> Tensor:
    """Return R rectangles as a tensor on the device, (R, 4) int32.

    The tensor is cached, because a copy to the device synchronizes, and a CUDA graph cannot capture
    the copy.
    """
    return torch.tensor(rects, dtype=torch.int32, device=device)
