"""Launch the kernels that sum the gradients of the global keys and of the biases.

The gradient of a bias is a sum over images and over all pairs of a query and a key that share it.
`tile_kernel` sums the gradients of the scores over images and over the pairs of chunks with the
same biases, `bias_kernel` sums the result by bias.

Shapes: N heads, G global tokens, E entries of a bias table. T, R, C: see plan.py. `tensors` is (q,
k, v, dout, stats), as in fused.py.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vil.ops.attention_case import next_power_of_2
from vil.ops.backends.triton.launch import Launcher, Tokens, kernels
from vil.ops.backends.triton.plan import cache_on_device, make_plan
from vil.ops.layout import Layout
from vil.ops.window import Window

PROGRAMS = 1024  # programs that fill a large GPU, for kernels that can split their sums
SUMS_SHARE = 16  # partial sums take at most 1/16 of the bytes of the other tensors
PAIRS = 128  # pairs that a program of bias_kernel reads at a time


def global_gradients(launcher: Launcher, tensors: tuple, dk: Tensor, dv: Tensor) -> None:
    """Write the gradients of the G global keys and values to the first G tokens of dk and dv."""
    *inputs, stats = tensors
    call, images, heads = launcher.call, launcher.images, launcher.heads
    num_global, to_global = call.num_global, call.bias.to_global
    options = launcher.options("global") | {"K": max(16, next_power_of_2(num_global))}
    fit = PROGRAMS // 2 * 16 // (options["K"] * max(1, images * heads))  # fewer if sums are large
    splits = max(1, min(fit, -(-launcher.length // options["Q"])))
    shape = (2, images, heads, splits * num_global, launcher.channels)
    sums = dk.new_empty(shape, dtype=torch.float32)  # of dk, dv
    strides = (0, 0) if to_global is None else to_global.stride()
    kernels().global_kernel[(images * heads * splits,)](
        *inputs, *map(Tokens.of, sums.unbind()), stats, to_global, *strides,
        splits, heads, launcher.length, num_global, call.scale, **options,
    )  # fmt: skip
    for grad, total in zip((dk, dv), sums.unflatten(3, (splits, -1)).sum(3).unbind()):
        grad[:, :, :num_global] = total


def bias_gradients(launcher: Launcher, tensors: tuple) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the bias table (N, E) and of the bias toward global tokens (N, G).

    A gradient has the dtype and strides of its bias, and is None if the call does not have it.
    """
    if not launcher.has_bias:
        return None, None
    call, heads, plan = launcher.call, launcher.heads, launcher.plan(tensors)
    tiles, rows, columns = plan.bias_index.shape
    options, masks = launcher.options("tile", rows, columns), launcher.masks(plan)
    tile, exists, tile_head = masks
    key = (call.window, call.num_global, call.bias.table is not None, launcher.device)
    order, starts = sort_pairs(*key)
    grads = torch.zeros(heads, len(starts) - 1, device=launcher.device)
    blocks = heads * (rows // options["Q"]) * (columns // options["K"])
    tile_bytes = 4 * heads * rows * columns
    tensor_bytes = 8 * call.q.numel() * call.q.itemsize  # q, k, v, out and their gradients
    fit = max(1, tensor_bytes // SUMS_SHARE // tile_bytes)
    for first in range(0, tiles, fit):
        count = min(fit, tiles - first)
        wanted = min(fit, -(-PROGRAMS // blocks))
        jobs = divide_items(*key, launcher.images, first, count, wanted)
        sums = grads.new_empty(len(jobs.jobs), heads, rows, columns)
        kernels().tile_kernel[(blocks * len(jobs.jobs),)](
            *tensors, plan.lists, tile, exists, launcher.valid, sums, jobs.jobs, plan.items,
            plan.item_starts,
            launcher.images, heads, launcher.length, call.num_global, plan.head_stride, tiles,
            rows, columns, tile_head, call.scale, **options,
        )  # fmt: skip
        kernels().bias_kernel[(grads.shape[1], heads)](
            sums, order, starts, jobs.starts, grads,
            first, count, jobs.most, heads, rows * columns, PAIRS=PAIRS,
        )  # fmt: skip
    parts = grads.split([call.window.table_entries, call.num_global], 1)
    of_table, to_global = (
        None if bias is None else torch.empty_like(bias).copy_(part)
        for bias, part in zip(call.bias, parts)
    )
    return of_table, to_global


@cache_on_device
def sort_pairs(
    window: Window | Layout, num_global: int, has_table: bool, device: str
) -> tuple[Tensor, Tensor]:
    """Sort the pairs of a row and a column of all tiles of a plan by the index of their bias.

    Returns (order, starts) int32: the pairs that are not masked, as indices into (T, R, C), and the
    first pair of each of E + G biases, with the end.
    """
    plan = make_plan(window, num_global, has_table)
    index, order = plan.bias_index.flatten().sort(stable=True)
    starts = torch.searchsorted(index, torch.arange(plan.masked + 1, dtype=torch.int32))
    return order[: int(starts[-1])].int().to(device), starts.int().to(device)


class Jobs(NamedTuple):
    """How the items of some tiles are divided among jobs, for tile_kernel.

    jobs (J, 3) int32: the tile of a job, its number among the jobs of this tile, and their number.
    starts (tiles + 1,) int32: the first job of each tile. most: the largest number of jobs of a
    tile.
    """

    jobs: Tensor
    starts: Tensor
    most: int


@cache_on_device
def divide_items(
    window: Window | Layout, num_global: int, has_table: bool, device: str,
    images: int, first: int, count: int, wanted: int,
) -> Jobs:  # fmt: skip
    """Divide the items of `count` tiles of a plan, from tile `first` on, among about `wanted` jobs.

    Each tile has at least one job. images: the items of each image are separate.
    """
    plan = make_plan(window, num_global, has_table)
    starts = plan.item_starts.numpy().astype(np.int64)
    items = np.diff(starts).reshape(-1, len(plan.bias_index)).max(0)[first : first + count]
    share = wanted * items / max(1, items.sum())
    splits = np.clip(share.astype(np.int64), 1, np.maximum(1, items * images))
    ends = splits.cumsum()
    tile = np.repeat(np.arange(count), splits)
    number = np.arange(len(tile)) - (ends - splits)[tile]
    jobs = torch.from_numpy(np.stack([first + tile, number, splits[tile]], 1))
    starts = torch.from_numpy(np.concatenate([[0], ends]))
    return Jobs(jobs.int().to(device), starts.int().to(device), int(splits.max()))
