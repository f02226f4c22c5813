"""Launch the kernels that sum the gradients of the global keys and of the biases.

Shapes: N heads, G global tokens. `tensors` is (q, k, v, dout, lse, delta), as in backward.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.backends.triton.launch import (
    ENTRIES,
    LINES,
    PROGRAMS,
    TILE_SHARE,
    Launcher,
    Tokens,
    area,
    kernels,
    rectangles,
)
from vil.ops.backends.triton.layouts import make_steps
from vil.ops.layout import Layout


def global_gradients(launcher: Launcher, tensors: tuple, dk: Tensor, dv: Tensor) -> Tensor | None:
    """Write the gradients of the G global keys and values to the first G tokens of dk and dv.

    Returns the gradient of the bias toward global tokens, (N, G); None without this bias.
    tensors: (q, k, v, dout, lse, delta).
    """
    q, k, v, dout, lse, delta = tensors
    options = launcher.options("global", "keys")
    options.pop("K")
    groups = max(1, launcher.images * launcher.heads)
    fit = PROGRAMS // 2 * 16 // (launcher.global_block * groups)  # fewer if the parts are large
    splits = max(1, min(fit, -(-launcher.length // options["Q"])))
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
    """Return the gradient of the bias table (N heads, entries) float32.

    tensors: (q, k, v, dout, lse, delta).
    """
    of_kind = _of_layout if isinstance(launcher.window, Layout) else _of_window
    return of_kind(launcher, tensors)


def _of_window(launcher: Launcher, tensors: tuple) -> Tensor:
    """Return the gradient of a window's bias table, (heads, entries) float32."""
    window, heads = launcher.window, launcher.heads
    options = launcher.options("tile", "queries")
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
                *launcher.reach, launcher.scale,
                MASK=int(window.mask), **options,
            )  # fmt: skip
            kernels().table_kernel[(heads * -(-side * side // ENTRIES),)](
                tile, sums, part, top, left, cells // (right - left), right - left, cells, splits,
                heads, window.size, Q=options["Q"], LINES=LINES, ENTRIES=ENTRIES,
            )  # fmt: skip
    return sums


def _of_layout(launcher: Launcher, tensors: tuple) -> Tensor:
    """Return the gradient of a layout's bias table, (heads, entries) float32."""
    layout, heads = launcher.window, launcher.heads
    steps = make_steps(layout, launcher.device)
    options = launcher.options("step", "queries")
    (rows, cols), w = steps.span, layout.size
    sums = torch.zeros(heads, 2 * rows * w - 1, 2 * cols * w - 1, device=launcher.device)
    blocks = heads * -(-layout.tile // options["K"])
    fit = 8 * launcher.bytes // TILE_SHARE // (4 * heads * options["Q"] * layout.tile)
    together = max(1, min(steps.count, fit))
    items = launcher.images * len(steps.keys) // max(1, steps.count)  # of a step, on average
    splits = max(1, min(PROGRAMS // (blocks * together), fit // together, items))
    tile = sums.new_empty(splits, together, heads, options["Q"], layout.tile)
    for first in range(0, steps.count, together):
        count = min(together, steps.count - first)
        for part in range(-(-layout.tile // options["Q"])):
            kernels().step_kernel[(blocks * count * splits,)](
                *tensors, launcher.table, launcher.valid_hw, tile, steps.lists, steps.keys,
                part, first, count, splits, launcher.images, heads, *layout.grid, w,
                launcher.num_global, *launcher.reach, launcher.scale, **options,
            )  # fmt: skip
            kernels().displacement_kernel[(heads * -(-sums[0].numel() // ENTRIES),)](
                tile, steps.numbers, sums, part, first, count, splits, heads, rows, cols, w,
                Q=options["Q"], LINES=LINES, ENTRIES=ENTRIES,
            )  # fmt: skip
    for axis, reach in enumerate(layout.table_reach):
        sums = fold(sums, axis + 1, reach)
    return sums.flatten(1)


def fold(sums: Tensor, axis: int, reach: int) -> Tensor:
    """Cut or pad an axis of `sums` to the displacements -reach to reach.

    sums: gradient of the bias for each displacement between two tokens. Gradients beyond `reach`
    are added to the outermost entries, because the bias table clamps displacements. Padding is 0.
    """
    far = sums.shape[axis] // 2 - reach
    if far <= 0:
        return F.pad(sums, [0, 0] * (sums.ndim - 1 - axis) + [-far, -far])
    near = sums.narrow(axis, far, 2 * reach + 1).clone()
    for entry, start in ((0, 0), (2 * reach, far + 2 * reach + 1)):
        near.narrow(axis, entry, 1).add_(sums.narrow(axis, start, far).sum(axis, keepdim=True))
    return near
