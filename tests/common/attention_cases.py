"""The cases that backends are tested on: a table of every pair of values, and all the values."""

import itertools
import random
from collections.abc import Iterable

import torch

from vil.ops import Case, Window


def kinds(modes: Iterable[int]) -> list[tuple[int, int]]:
    """(SW_EXACT, MODE): the exact window, and chunks and cyclic ones of these modes."""
    return [(1, 0), *((exact, mode) for exact in (0, -1) for mode in modes)]


FACTORS = {
    "kind": kinds(range(-1, 9)),
    "grid": [(1, 1), (1, 9), (7, 8), (5, 13), (14, 14)],
    "window": [2, 3, 4, 7, 15],  # smaller and larger than the grids, dividing them or not
    "num_global": [0, 1, 3],
    "bias": [(False, False), (True, False), (False, True), (True, True)],
    "valid": [False, True],
    "dtype": [torch.float32, torch.bfloat16, torch.float64],
}
# the other modes are one neighbor as well: tests/golden and random cases have them
TABLE = FACTORS | {"kind": kinds([-1, 0, 1, 4, 8])}


def make_case(kind, grid, window, num_global, bias, valid, dtype) -> Case:
    return Case(
        Window.from_mode(grid, window, *kind),
        batch=2,
        heads=2,
        head_dim=4,
        num_global=num_global,
        dtype=dtype,
        table_bias=bias[0],
        global_bias=bias[1] and num_global > 0,
        valid=valid,
    )


def pairwise_rows(tries: int = 40) -> list[tuple]:
    """A greedy covering array: every value of a factor meets every value of every other factor."""
    draw, values = random.Random(0), list(TABLE.values())
    columns = list(itertools.combinations(range(len(values)), 2))
    open_pairs = {
        (i, j, a, b)
        for i, j in columns
        for a in range(len(values[i]))
        for b in range(len(values[j]))
    }
    rows = []
    while open_pairs:
        i, j, a, b = min(open_pairs)
        best: tuple[int, tuple, set] = (-1, (), set())
        for _ in range(tries):
            row = [draw.randrange(len(column)) for column in values]
            row[i], row[j] = a, b
            covers = {(c, d, row[c], row[d]) for c, d in columns} & open_pairs
            best = max(best, (len(covers), tuple(row), covers), key=lambda found: found[0])
        open_pairs -= best[2]
        rows.append(tuple(column[at] for column, at in zip(values, best[1])))
    return rows


PAIRWISE = [make_case(*row) for row in pairwise_rows()]


def name_of(case: Case) -> str:
    window = case.window
    bias = "t" * case.table_bias + "g" * case.global_bias
    if case.is_layout:
        return (
            f"{window.grid[0]}x{window.grid[1]}-w{window.size}-{window.pattern}-G{case.num_global}"
            f"-bias{bias or 0}-reach{window.max_reach}-valid{int(case.valid)}-{str(case.dtype)[6:]}"
        )
    offsets = (
        "all" if len(window.offsets) == 9 else "+".join(f"{dx}{dy}" for dx, dy in window.offsets)
    )
    return (
        f"{window.grid[0]}x{window.grid[1]}-w{window.size}-exact{int(window.mask)}-{offsets}-G{case.num_global}"
        f"-bias{bias or 0}-valid{int(case.valid)}-{str(case.dtype)[6:]}"
    )
