"""Launch the Triton kernels: their common arguments, and their block sizes.

The kernels are imported at the first call, so that this file does not need Triton. With
TRITON_INTERPRET=1 in the environment before Triton is imported, they run on the CPU, slowly.

Shapes: B batch, N heads, L tokens, G global tokens, D head dim, E entries of a bias table. T, R, C:
see plan.py.
"""

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import next_power_of_2
from vil.ops.backends.triton.launches import find_launch
from vil.ops.backends.triton.plan import BLOCK, Plan, make_plan
from vil.ops.call import Call
from vil.ops.window import real_cells

EXPANDED = 4096  # biases that a program of expand_kernel writes


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


class Launcher:
    """Launches the kernels of a call with their common arguments: lists, biases, masks and sizes.

    valid (B, G+L) float32 or None: 0 for keys, -inf for padding.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.device = call, str(call.q.device)
        self.images, self.heads, self.length, self.channels = call.q.shape
        self.dtype = torch.float16 if call.q.itemsize == 2 else torch.float32  # of biases
        self.has_bias, self.valid = any(bias is not None for bias in call.bias), None
        self.tile: Tensor | None = None  # result of `expand` for the plan that is not transposed
        if call.valid_hw is not None:
            real = real_cells(call.valid_hw.to(call.q.device), call.window.grid).flatten(1)
            mask = torch.where(real, 0.0, -math.inf)
            self.valid = F.pad(mask, (call.num_global, 0)).contiguous()
        self.target = current_target()
        may_round = torch.get_float32_matmul_precision() != "highest"
        self.precision = "tf32" if may_round and call.q.dtype == torch.float32 else "ieee"

    def plan(self, tensors: Sequence[Any], transposed: bool = False) -> Plan:
        """Return the plan of the call. tensors: those `Tokens` among them are read or written."""
        call = self.call
        has_table = call.bias.table is not None
        plan = make_plan(call.window, call.num_global, has_table, transposed, self.device)
        tokens = [x for x in tensors if isinstance(x, Tokens)]
        if all(x.at.shape[2] * abs(x.token) < 2**31 for x in tokens):
            return plan
        # token indices in 64 bits, because their offsets in memory do not fit into 32
        lists, items = plan.lists, plan.items.long()
        lists = lists._replace(row_base=lists.row_base.long(), pair_base=lists.pair_base.long())
        return plan._replace(lists=lists, items=items)

    def masks(
        self, plan: Plan, transposed: bool = False
    ) -> tuple[Tensor | None, Tensor | None, int]:
        """Return the arguments TILE, EXISTS and tile_head of a kernel.

        transposed: whether the plan is transposed.
        """
        has_tile = self.has_bias or plan.has_mask
        exists = plan.exists if plan.shares_tile or not has_tile else None
        if not has_tile:
            return None, exists, 0
        index = plan.bias_index
        if transposed:
            tile = self.expand(index)
        else:  # two kernels of the backward pass read it
            tile = self.tile = self.expand(index) if self.tile is None else self.tile
        return tile, exists, index.numel() if self.has_bias else 0

    def expand(self, index: Tensor) -> Tensor:
        """Return the tiles (N or 1, T * R * C) of biases and masks. index: `Plan.bias_index`."""
        call, size = self.call, index.numel()
        tile = call.q.new_empty(self.heads if self.has_bias else 1, size, dtype=self.dtype)
        strides = [(0, 0) if bias is None else bias.stride() for bias in call.bias]
        kernels().expand_kernel[(-(-size // EXPANDED), len(tile))](
            *call.bias, index, tile, call.window.table_entries, call.num_global, size,
            *strides[0], *strides[1], torch.finfo(self.dtype).max, COUNT=EXPANDED,
        )  # fmt: skip
        return tile

    def options(self, name: str, rows: int = BLOCK, columns: int = BLOCK) -> dict[str, Any]:
        """Return the compile-time constants and launch options of a kernel.

        rows, columns: R and C of its plan.
        """
        kind = self.call.q.itemsize, self.precision
        return launch_options(self.target, name, rows, columns, self.channels, *kind)

    def by_group(self, name: str, *tensors: Any) -> None:
        """Launch a kernel with one program per image, head, and block of queries or keys.

        name: forward, query or key. tensors: the first arguments of the kernel.
        """
        transposed = name == "key"
        plan, call = self.plan(tensors, transposed), self.call
        tile, exists, tile_head = self.masks(plan, transposed)
        _, rows, columns = plan.bias_index.shape
        options = self.options(name, rows, columns)
        blocks = plan.groups * rows // options["K" if transposed else "Q"]
        getattr(kernels(), f"{name}_kernel")[(self.images * self.heads * blocks,)](
            *tensors, plan.lists, tile, exists, self.valid,
            self.heads, self.length, call.num_global, plan.groups, plan.head_stride, rows, columns,
            tile_head, call.scale,
            LAYOUT=plan.is_layout, **options,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def launch_options(
    target: str, name: str, rows: int, columns: int, channels: int, itemsize: int, precision: str
) -> dict[str, Any]:
    """Return the compile-time constants and launch options of a kernel, see `Launcher.options`."""
    padded = max(16, next_power_of_2(channels))
    launch = find_launch(target, name, padded, itemsize, precision == "tf32")
    queries, keys = (columns, rows) if name == "key" else (rows, columns)
    sizes = {"Q": min(launch.queries, queries), "K": min(launch.keys, keys)}
    constants = {"D": channels, "D_PAD": padded, "PRECISION": precision}
    return constants | sizes | launch.options()


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

    target: Any = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else target.arch


@lru_cache(maxsize=1)
def kernels() -> ModuleType:
    """Import the module of the kernels."""
    if interpreted():
        from vil.ops.backends.triton.interpreter import repair

        repair()
    from vil.ops.backends.triton import kernels as module

    return module
