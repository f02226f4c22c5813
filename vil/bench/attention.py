"""Benchmark local attention backends and baselines in interleaved rounds.

A case is one attention call: its tensor sizes and its window or pattern. The baselines are torch's
full attention without bias (`sdpa`), torch's attention with the mask of a pattern (`sdpa_masked`),
and NATTEN if it is installed (`natten`). The lower bound `floor` is the time of the matmuls alone.

Memory is the peak size of the tensors that one forward and backward pass allocates. `peak_mib`
includes the output and the gradients of the inputs, and `extra_mib` does not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from vil.bench.baselines import BESIDE, count_pairs, find_floor, make_candidate, reasons_against
from vil.ops import BACKENDS, Case, choose
from vil.ops.testing import make_inputs
from vil.ops.window import ALL_NINE, NEIGHBORS, Window
from vil.utils.errors import one_line
from vil.utils.interleaved_timer import Candidate, peak_bytes, time_interleaved
from vil.utils.lookup import lookup
from vil.utils.machine import free_bytes

MIB = 2**20
FLOOR = "floor"
BASES = ("chunk_handgrad", "sdpa", FLOOR)  # each row's time is divided by the time of each base
SPARE = 0.8  # fraction of the free memory that may be used
ROUNDS = 9
ALL_PAIRS = ("masked", "sdpa", "sdpa_masked")  # these multiply every query with every key


@dataclass
class Row:
    """Measurements of one backend or baseline on one attention call.

    auto: whether backend="auto" selects this backend.
    forward_ms, backward_ms: median times.
    over_NAME: total time divided by that of the backend or baseline NAME.
    peak_mib, extra_mib: peak memory with and without output and gradients.
    note: a remark such as "full attention, no bias".
    reason: why there are no measurements, or "".
    """

    backend: str
    case: Case
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
        """Forward plus backward time; None if the row was not measured."""
        return None if self.forward_ms is None else self.forward_ms + self.backward_ms

    @property
    def spec(self) -> dict:
        """Settings of the attention call as {column of the result file: value}. "pairs" is the
        number of query-key pairs, summed over images and heads."""
        case, window = self.case, self.case.window
        return dict(
            grid=list(window.grid),
            window=window.size,
            mask=str(window.pattern) if case.is_layout else window.mask.name.lower(),
            mode=None if case.is_layout else mode_of(window),
            **{name: getattr(case, name) for name in ("batch", "heads", "head_dim", "num_global")},
            dtype=str(case.dtype).removeprefix("torch."),
            bias=case.table_bias,
            device=case.device,
            pairs=case.batch * case.heads * count_pairs(window, case.num_global),
        )


def measure(
    case: Case, names: Iterable[str], rounds: int = ROUNDS, max_bytes: float | None = None
) -> list[Row]:
    """Measure backends and baselines on one attention call. Returns a row for each name, then the
    row of the lower bound `floor`.

    names: the backends and baselines. rounds: number of measurements of each name; slow ones get
    fewer. max_bytes: a backend does not run if its estimated memory exceeds this; None for 0.8 of
    the free memory. Raises ValueError for an unknown name.
    """
    names, device = list(dict.fromkeys(names)), torch.device(case.device)
    for name in names:
        lookup({**BACKENDS, **BESIDE}, name, "backend")
    max_bytes = SPARE * free_bytes(device) if max_bytes is None else max_bytes
    reasons = {name: "; ".join(reasons_against(name, case, max_bytes)) for name in names}
    floor, floor_seconds = find_floor(case)
    candidates, inputs = {FLOOR: floor}, make_inputs(case)
    window, num_global = case.window, case.num_global
    all_pairs = window.length * (num_global + window.length)
    for name in (name for name in names if not reasons[name]):
        try:
            candidates[name] = make_candidate(name, case, inputs)
        except Exception as error:
            reasons[name] = one_line(error)
            continue
        if name in ALL_PAIRS:
            least = floor_seconds * all_pairs / count_pairs(window, num_global)
            candidates[name] = replace(candidates[name], least=least)
    times, dropped = time_interleaved(candidates, rounds, device, exempt=[FLOOR])
    reasons |= dropped
    rows = []
    for name in (*names, FLOOR):
        note = BESIDE[name].note if name in BESIDE else ""
        row = Row(name, case, name == choose(case), note=note, reason=reasons.get(name, ""))
        if name in times:
            row.rounds = len(times[name].forward)
            row.forward_ms, row.backward_ms = times[name].forward_ms, times[name].backward_ms
            for base in times.keys() & set(BASES):
                setattr(row, f"over_{base}", row.total_ms / times[base].total_ms)
            if name != FLOOR:  # the floor's buffers are not what a backend needs
                add_memory(row, candidates[name], device)
        rows.append(row)
    return rows


def mode_of(window: Window) -> int | None:
    """Return the value of the config key MODE (-1, 0 or 1..8) that selects the same neighboring
    chunks as `window`; None if there is no such value."""
    if window.offsets == ALL_NINE:
        return 0
    if len(window.offsets) == 1:
        return -1
    others = [offset for offset in window.offsets if offset != (0, 0)]
    return NEIGHBORS.index(others[0]) + 1 if len(others) == 1 else None


def add_memory(row: Row, candidate: Candidate, device: torch.device) -> None:
    """Measure the peak memory of a forward and backward pass, and store it in the row. If the
    measurement fails, add the reason to the row's note. candidate: functions that run the two
    passes."""
    try:
        row.peak_mib, row.extra_mib = (size / MIB for size in peak_bytes(candidate, device))
    except Exception as error:
        row.note = "; ".join(filter(None, [row.note, f"memory: {one_line(error)}"]))


def plain(rows: Iterable[Row]) -> list[dict]:
    """Convert rows to dicts for JSON and CSV."""
    return [
        {"backend": row.backend, **row.spec}
        | {name: value for name, value in vars(row).items() if name != "case"}
        for row in rows
    ]
