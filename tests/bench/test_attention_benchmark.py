"""Attention benchmark: every row has times or a reason, the floor counts the reference's pairs."""

import dataclasses

import pytest
import torch

from tests.common.backends import restored_backends
from vil.ops import BACKENDS, Case, Layout, Window, choose, patterns, register_backend
from vil.ops.reference import attended_keys
from vil.workflows.benchmark_attention import BASELINES, FLOOR, count_pairs, matmuls, measure

CASE = Case(Window((7, 8), 3), 2, 2, 4, 1, table_bias=True, global_bias=True)
KINDS = [(1, 0), *((exact, mode) for exact in (0, -1) for mode in (-1, 0, 3))]


@pytest.fixture
def own_table():
    with restored_backends():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_the_pairs_are_those_of_the_reference(kind):
    for grid in ((1, 1), (1, 9), (7, 8), (5, 13)):
        window = Window.from_mode(grid, 3, *kind)
        keys = [len(attended_keys(window, x, y)) for x in range(grid[0]) for y in range(grid[1])]
        for num_global in (0, 2):
            assert count_pairs(window, num_global) == sum(keys) + num_global * len(keys)


@pytest.mark.long
def test_a_pattern_is_measured_beside_attention_under_its_mask():
    layout = Layout((5, 7), 3, patterns.parse_pattern("axial | local:1"))
    case = dataclasses.replace(CASE, window=layout)
    assert count_pairs(layout, 2) == layout.mask.sum() + 2 * 35
    rows = {row.backend: row for row in measure(case, ["blocked", "gathered", "sdpa_masked"], 1)}
    assert rows["blocked"].total_ms > 0
    assert rows["sdpa_masked"].total_ms > 0
    assert rows["gathered"].reason == "it computes windows, not patterns"
    assert rows["blocked"].spec["mask"] == "axial | local:1,max"
    assert measure(CASE, ["sdpa_masked"], 1)[0].reason.startswith("it computes patterns")


@pytest.mark.parametrize("side", [7, 40])
@pytest.mark.parametrize("tile", [(8, 32), (64, 512), (1024, 1024)])
def test_the_floor_multiplies_as_many_pairs_as_are_visited(side, tile):
    case = dataclasses.replace(CASE, window=Window((side, side), 7))
    pairs = case.batch * case.heads * count_pairs(case.window, case.num_global)
    for passes, count in (("forward", 2), ("backward", 5)):
        bare = matmuls(case, tile)
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            bare.forward() if passes == "forward" else bare.backward([])
        expected = 2 * count * pairs * case.head_dim
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)


@pytest.mark.long
def test_every_row_has_measurements_or_a_reason():
    rows = {row.backend: row for row in measure(CASE, [*BACKENDS, *BASELINES], rounds=2)}
    assert list(rows) == [*BACKENDS, *BASELINES, FLOOR]
    for name, row in rows.items():
        if row.reason:
            assert row.forward_ms is row.backward_ms is row.extra_mib is row.over_floor is None
            continue
        assert row.forward_ms > 0
        assert row.backward_ms > 0
        assert row.rounds == 2
        assert row.over_floor == pytest.approx(row.total_ms / rows[FLOOR].total_ms)
        assert name == FLOOR or row.peak_mib > row.extra_mib >= 0
    for name, entry in BACKENDS.items():
        assert rows[name].reason == "; ".join(entry.unsupported(CASE))
    assert [name for name, row in rows.items() if row.auto] == [choose(CASE)]


def test_a_backend_that_fails_is_a_reason(own_table):
    def fails(*args, **options):
        raise RuntimeError("out of luck\nand more")

    def fails_backward(q, *rest, **options):
        q.register_hook(fails)
        return q * 1

    register_backend("early", fails)
    register_backend("late", fails_backward)
    rows = {row.backend: row for row in measure(CASE, ["early", "late", "blocked"], 1)}
    assert rows["early"].reason == rows["late"].reason == "RuntimeError: out of luck"
    assert rows["blocked"].total_ms > 0
