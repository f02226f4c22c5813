"""Fused local attention in Triton: one forward and a few backward kernels, no copies of q, k or v.

This file is the host side: limits, launch parameters, buffers. The kernels are in forward.py and
backward.py, which are imported with the first call, so that this file does not need Triton. With
TRITON_INTERPRET=1 in the environment (before Triton is first imported) they run on the CPU, slowly.

Besides inputs, output and gradients the backward pass allocates delta, 4 bytes per query and head,
and partial sums: with a table at most 1/TILE_SHARE of the bytes of q, k, v, out and their gradients
(more only where one tile of scores, 4 * 64 * 9 * w**2 bytes per head, is larger). For 8 images of
56 x 56 tokens, 6 heads of 64 channels, w 8 and bfloat16: 0.6 + 8.8 MB to 154 MB, 6 %; without a
table 0.4 %.

Shapes: B batch, N heads, X Y grid, L = X*Y tokens, G global tokens, D head dim, w chunk side,
W = w*w tokens of a chunk.
"""

import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.attention_case import Case, next_power_of_2
from vil.ops.backends import blocked
from vil.ops.call import Call, Gradients
from vil.ops.window import Window

HEAD_DIMS = (16, 128)
WINDOWS = (2, 32)
MAX_GLOBAL = 64
MIN_CAPABILITY = (8, 0)  # the first with bfloat16 and asynchronous copies
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PROGRAMS = 1024  # enough to fill a large GPU where the number of splits is free
TILE_SHARE = 16  # tiles of scores take at most 1/16 of the bytes of the other tensors
ENTRIES, LINES = 128, 16  # of the table and of a tile, per step of the last kernel

Rectangle = tuple[int, int, int, int]


class Launch(NamedTuple):
    """The largest blocks of queries and of keys, the number of warps, and the pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


LAUNCHES = {  # (pass, D_PAD, bytes per number); a smaller D_PAD uses the entry of 64
    ("forward", 64, 2): Launch(64, 64, 4, 3),
    ("forward", 128, 2): Launch(64, 64, 4, 2),
    ("forward", 64, 4): Launch(32, 32, 4, 2),
    ("forward", 128, 4): Launch(32, 16, 4, 2),
    ("backward", 64, 2): Launch(64, 64, 4, 2),
    ("backward", 128, 2): Launch(64, 64, 8, 2),
    ("backward", 64, 4): Launch(32, 32, 4, 2),
    ("backward", 128, 4): Launch(32, 16, 4, 2),
}


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


def unsupported(case: Case) -> list[str]:
    """Return the reasons why this backend does not support a case."""
    has_gpu = case.device == "cuda" and torch.cuda.is_available()
    too_old = has_gpu and torch.cuda.get_device_capability() < MIN_CAPABILITY
    channels_fit = HEAD_DIMS[0] <= case.head_dim <= HEAD_DIMS[1]
    window_fits, size = WINDOWS[0] <= case.window.size <= WINDOWS[1], case.window.size
    checks = {
        "triton is not installed": find_spec("triton") is None,
        f"it needs a CUDA device, not {case.device}": case.device != "cuda" and not interpreted(),
        "it needs a GPU of compute capability {}.{} or newer".format(*MIN_CAPABILITY): too_old,
        f"it computes in 16 or 32 bits, not in {str(case.dtype)[6:]}": case.dtype not in DTYPES,
        "heads must have {} to {} channels".format(*HEAD_DIMS): not channels_fit,
        "the window must be {} to {}, not {}".format(*WINDOWS, size): not window_fits,
        f"{case.num_global} global tokens are more than {MAX_GLOBAL}": case.num_global > MAX_GLOBAL,
    }
    # recomputing the scores of chunks has the limits of the blocked backend
    return [text for text, applies in checks.items() if applies] + blocked.unsupported(case)


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1)
def kernels() -> SimpleNamespace:
    """Return the kernels and their helpers by name."""
    if interpreted():
        from vil.ops.backends.triton.interpreter import repair

        repair()
    from vil.ops.backends.triton import backward, forward

    return SimpleNamespace(**(vars(forward) | vars(backward)))


class Launcher:
    """The arguments that all kernels of a call share: sizes, float32 biases and launch
    parameters."""

    def __init__(self, call: Call) -> None:
        q, valid_hw = call.q, call.valid_hw
        self.window, self.scale, self.num_global = call.window, call.scale, call.num_global
        self.images, self.heads, self.length, self.channels = q.shape
        self.device, self.bytes = q.device, q.numel() * q.itemsize
        self.table, self.to_global = (
            None if bias is None or not bias.numel() else bias.float().contiguous()
            for bias in call.bias
        )
        self.valid_hw = (
            None if valid_hw is None else valid_hw.to(q.device, torch.int64).contiguous()
        )
        self.padded = max(16, next_power_of_2(self.channels))
        self.launches = {
            direction: LAUNCHES[direction, max(64, self.padded), q.itemsize]
            for direction in ("forward", "backward")
        }
        self.global_block = max(16, next_power_of_2(self.num_global)) if self.num_global else 0

    def options(self, direction: str, owned: str) -> dict[str, int]:
        """Return the constants and launch options of a kernel.

        owned: "queries" or "keys". A program of the kernel computes one block of these, and loops
        over the blocks of the other.
        """
        launch, cells = self.launches[direction], max(map(area, rectangles(self.window)))
        own, walked = (max(16, next_power_of_2(n)) for n in (self.window.tile, cells))
        owns_queries = owned == "queries"
        return {
            "D": self.channels,
            "D_PAD": self.padded,
            "Q": min(launch.queries, own if owns_queries else walked),
            "K": min(launch.keys, walked if owns_queries else own),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }

    def by_chunk(self, kernel: Callable, direction: str, owned: str, *tensors, **constants) -> None:
        """Launch one program per block of queries (or keys) of each chunk, for each image and
        head."""
        options, window = self.options(direction, owned), self.window
        parts = -(-window.tile // options["Q" if owned == "queries" else "K"])
        rects = rectangles(window, mirrored=owned == "keys")
        kernel[(self.images * self.heads * window.chunks[0] * window.chunks[1] * parts,)](
            *tensors, on_device(rects, self.device),
            len(rects), self.heads, *window.grid, window.size, self.num_global, parts, self.scale,
            MASK=int(window.mask), **options, **constants,
        )  # fmt: skip


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the output and the log-sum-exp, see `vil.ops.custom_op`."""
    q, launcher = call.q, Launcher(call)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(q):
        launcher.by_chunk(
            kernels().forward_kernel, "forward", "queries",
            *map(Tokens.of, (q, call.k, call.v, out)), lse,
            launcher.table, launcher.to_global, launcher.valid_hw, K_GLOBAL=launcher.global_block,
        )  # fmt: skip
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Compute the gradients; see `vil.ops.custom_op`."""
    launcher, (table, to_global) = Launcher(call), call.bias
    dq, dk, dv = (torch.empty_like(x) for x in call[:3])
    lse, delta = lse.contiguous(), torch.empty_like(lse, memory_format=torch.contiguous_format)
    inputs, grads = [Tokens.of(x) for x in call[:3]], Tokens.of(dout)
    with torch.cuda.device_of(dq):
        launcher.by_chunk(
            kernels().query_kernel, "backward", "queries",
            *inputs, Tokens.of(out), grads, Tokens.of(dq), lse, delta,
            launcher.table, launcher.to_global, launcher.valid_hw, K_GLOBAL=launcher.global_block,
        )  # fmt: skip
        launcher.by_chunk(
            kernels().key_kernel, "backward", "keys",
            *inputs, grads, Tokens.of(dk), Tokens.of(dv), lse, delta,
            launcher.table, launcher.valid_hw,
        )  # fmt: skip
        rest = (*inputs, grads, lse, delta)
        dto_global = global_gradients(launcher, rest, dk, dv) if call.num_global else None
        dtable = None if table is None else table_gradient(launcher, rest).to(table.dtype)
    if to_global is not None:  # without global tokens it has no elements
        dto_global = (
            torch.empty_like(to_global) if dto_global is None else dto_global.to(to_global.dtype)
        )
    return dq, dk, dv, dtable, dto_global


def global_gradients(launcher: Launcher, tensors: tuple, dk: Tensor, dv: Tensor) -> Tensor | None:
    """Write the gradients of the global keys to dk and dv. Return the gradient of their bias (N,
    G)."""
    q, k, v, dout, lse, delta = tensors
    options = launcher.options("backward", "keys")
    groups = max(1, launcher.images * launcher.heads)
    fit = PROGRAMS // 2 * 16 // (launcher.global_block * groups)  # fewer if the parts are large
    splits = max(1, min(fit, -(-launcher.length // options.pop("K"))))
    lead = (launcher.images, launcher.heads)
    parts = [
        lse.new_empty(*lead, splits * launcher.num_global, launcher.channels) for _ in range(2)
    ]  # of dk, dv
    bias = None if launcher.to_global is None else lse.new_empty(*lead, splits, launcher.num_global)
    kernels().global_kernel[(launcher.images * launcher.heads * splits,)](
        q, k, v, dout, *map(Tokens.of, parts), lse, delta, launcher.to_global, bias,
        splits, launcher.heads, launcher.length, launcher.num_global, launcher.scale,
        K_GLOBAL=launcher.global_block, **options,
    )  # fmt: skip
    for grad, part in zip((dk, dv), parts):
        grad[:, :, : launcher.num_global] = part.unflatten(2, (splits, -1)).sum(2)
    return None if bias is None else bias.sum((0, 2))


def table_gradient(launcher: Launcher, tensors: tuple) -> Tensor:
    """Return the gradient of the bias table (N, (4w-1)**2) float32, summed over images and
    chunks."""
    window, heads = launcher.window, launcher.heads
    options = launcher.options("backward", "queries")
    side = 4 * window.size - 1
    items = launcher.images * window.chunks[0] * window.chunks[1]
    sums = torch.zeros(heads, side * side, device=launcher.device)
    for rect in rectangles(window):
        cells, (top, _, left, right) = area(rect), rect
        blocks = heads * -(-cells // options["K"])
        tile_bytes = 4 * heads * options["Q"] * cells
        fit = 8 * launcher.bytes // TILE_SHARE // tile_bytes  # q, k, v, out and their gradients
        splits = max(1, min(PROGRAMS // blocks, fit, items))
        tile = sums.new_empty(splits, heads, options["Q"], cells)
        for part in range(-(-window.tile // options["Q"])):
            kernels().tile_kernel[(blocks * splits,)](
                *tensors, launcher.table, launcher.valid_hw, tile,
                part, top, left, right - left, cells, splits,
                launcher.images, heads, *window.grid, window.size, launcher.num_global,
                launcher.scale,
                MASK=int(window.mask), **options,
            )  # fmt: skip
            kernels().table_kernel[(heads * -(-side * side // ENTRIES),)](
                tile, sums, part, top, left, cells // (right - left), right - left, cells, splits,
                heads, window.size, Q=options["Q"], LINES=LINES, ENTRIES=ENTRIES,
            )  # fmt: skip
    return sums


def rectangles(window: Window, mirrored: bool = False) -> tuple[Rectangle, ...]:
    """Return rectangles that contain the keys of a chunk: one if possible, else one per offset.

    A rectangle is (first row, end row, first column, end column), relative to the chunk's corner.
    With `mirrored`, they contain the queries that attend to the chunk instead.
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
    """Return the number of tokens of a rectangle."""
    return (rect[1] - rect[0]) * (rect[3] - rect[2])


@lru_cache(maxsize=256)
def on_device(rects: tuple[Rectangle, ...], device: torch.device) -> Tensor:
    """Return the rectangles on the device, (R, 4) int32.

    The tensor is cached, because copying to the device synchronizes and cannot be in a CUDA graph.
    """
    return torch.tensor(rects, dtype=torch.int32, device=device)
