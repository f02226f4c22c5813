"""Time and memory of local attention: all backends on one case, in turns, and what to hold them to.

Beside the backends of the table stand `sdpa`, torch's full attention without bias; `natten`, where
it is installed; and `floor`, the bare products of the pairs of query and key that are visited: two
forward, five backward. All of a case is measured in one run.

A row's memory is counted in tensors, at the peak of one forward and its backward. peak_mib is all
that the call made; extra_mib is that less the output and the gradients, which anyone must make.
Inputs and the gradient of the output were there before and count in neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

import torch

from vil.bench.baselines import (
    BESIDE,
    candidate,
    floor,
    full_pairs,
    reasons_against,
    visited,
)
from vil.bench.interleaved_timer import Times, held, race
from vil.ops import BACKENDS, Case, choose
from vil.ops.testing import make_inputs
from vil.ops.window import ALL_NINE, NEIGHBORS, Window
from vil.utils.errors import one_line
from vil.utils.lookup import lookup
from vil.utils.machine import free_bytes

MIB = 2**20
FLOOR = "floor"
BASES = ("chunk_handgrad", "sdpa", FLOOR)  # what a row's time is divided by
SPARE = 0.8  # of the free memory may be used
ROUNDS = 9
ALL_PAIRS = ("masked", "sdpa")  # those that multiply every query with every key


@dataclass(frozen=True)
class Row:
    """A backend on a case: its figures, or the reason why it has none.

    pairs: visited pairs of query and key, of all images and heads. forward_ms, backward_ms:
    medians. over_*: forward and backward together over another's. auto: what `auto` takes.
    note: what to bear in mind when comparing.
    """

    backend: str
    grid: tuple[int, int]
    window: int
    mask: str
    mode: int | None
    batch: int
    heads: int
    head_dim: int
    num_global: int
    dtype: str
    bias: bool
    device: str
    pairs: int
    auto: bool = False
    rounds: int = 0
    forward_ms: float | None = None
    backward_ms: float | None = None
    peak_mib: float | None = None
    extra_mib: float | None = None
    over_chunk_handgrad: float | None = None
    over_sdpa: float | None = None
    over_floor: float | None = None
    note: str = ""
    reason: str = ""

    @property
    def total_ms(self) -> float | None:
        """Forward and backward; None where there is a reason instead."""
        return None if self.forward_ms is None else self.forward_ms + self.backward_ms


COLUMNS = [field.name for field in fields(Row)]


def measure(
    case: Case, names: Iterable[str], rounds: int = ROUNDS, max_bytes: float | None = None
) -> list[Row]:
    """A row for each name of BACKENDS or BESIDE, and one for the floor.

    max_bytes: a candidate that is estimated to hold more is left out; by default 0.8 of what is
    free. Raises ValueError for an unknown name.
    """
    names, device = list(dict.fromkeys(names)), torch.device(case.device)
    for name in names:
        lookup({**BACKENDS, **BESIDE}, name, "backend")
    max_bytes = SPARE * free_bytes(device) if max_bytes is None else max_bytes
    reasons = {name: "; ".join(reasons_against(name, case, max_bytes)) for name in names}
    bare, fastest = floor(case)
    candidates, inputs = {FLOOR: bare}, make_inputs(case)
    for name in (name for name in names if not reasons[name]):
        more = full_pairs(case) / visited(case.window, case.num_global)
        try:
            least = fastest * more if name in ALL_PAIRS else 0.0
            candidates[name] = candidate(name, case, inputs, least)
        except Exception as error:
            reasons[name] = one_line(error)
    times, dropped = race(candidates, rounds, device, yardsticks=[FLOOR])
    rows = [blank(name, case, (reasons | dropped).get(name, "")) for name in (*names, FLOOR)]
    rows = [filled(row, times[row.backend]) if row.backend in times else row for row in rows]
    return compared([weighed(row, candidates, device) for row in rows])


def blank(name: str, case: Case, reason: str) -> Row:
    """The facts of a case, and why there is no figure."""
    window = case.window
    return Row(
        backend=name,
        grid=tuple(window.grid),
        window=window.size,
        mask=window.mask.name.lower(),
        mode=mode_of(window),
        batch=case.batch,
        heads=case.heads,
        head_dim=case.head_dim,
        num_global=case.num_global,
        dtype=str(case.dtype).removeprefix("torch."),
        bias=case.table_bias,
        device=case.device,
        pairs=case.batch * case.heads * visited(window, case.num_global),
        auto=name == choose(case),
        note=BESIDE[name][2] if name in BESIDE else "",
        reason=reason,
    )


def mode_of(window: Window) -> int | None:
    """The neighbour mode that has the window's offsets; None for offsets of the caller's own."""
    if window.offsets == ALL_NINE:
        return 0
    if len(window.offsets) == 1:
        return -1
    others = [offset for offset in window.offsets if offset != (0, 0)]
    return NEIGHBORS.index(others[0]) + 1 if len(others) == 1 else None


def filled(row: Row, times: Times) -> Row:
    """The row with its times."""
    return replace(
        row,
        rounds=len(times.forward),
        forward_ms=times.forward_ms,
        backward_ms=times.backward_ms,
    )


def weighed(row: Row, candidates: dict, device: torch.device) -> Row:
    """The row with its memory; the floor has none, it holds nothing that is needed."""
    if row.total_ms is None or row.backend == FLOOR:
        return row
    try:
        peak, extra = held(candidates[row.backend], device)
    except Exception as error:
        return replace(row, note="; ".join(filter(None, [row.note, f"memory: {one_line(error)}"])))
    return replace(row, peak_mib=peak / MIB, extra_mib=extra / MIB)


def compared(rows: list[Row]) -> list[Row]:
    """The rows with their time over that of each of BASES that was measured."""
    totals = {row.backend: row.total_ms for row in rows if row.total_ms is not None}
    return [
        replace(
            row,
            **{
                f"over_{base}": totals[row.backend] / totals[base]
                for base in BASES
                if row.backend in totals and base in totals
            },
        )
        for row in rows
    ]


def plain(rows: Iterable[Row]) -> list[dict]:
    """For JSON: lists, strings, numbers."""
    return [asdict(row) | {"grid": list(row.grid)} for row in rows]
