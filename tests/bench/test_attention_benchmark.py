"""Attention benchmark: every row has times or a reason, the floor counts the reference's pairs."""

import dataclasses
import json

import pytest
import torch

from tests.common.backends import restored_backends
from vil.bench.attention import FLOOR, measure, mode_of, plain
from vil.bench.baselines import BESIDE, count_pairs, matmuls, natten_reasons
from vil.ops import BACKENDS, Case, Layout, Window, choose, patterns, register_backend
from vil.ops.reference import attended_keys
from vil.utils.interleaved_timer import Candidate, peak_bytes, time_interleaved

CPU = torch.device("cpu")
CASE = Case(Window((7, 8), 3), 2, 2, 4, 1, table_bias=True, global_bias=True)
KINDS = [(1, 0), *((exact, mode) for exact in (0, -1) for mode in (-1, 0, 3))]


@pytest.fixture(scope="module")
def rows():
    return {row.backend: row for row in measure(CASE, [*BACKENDS, *BESIDE], rounds=2)}


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


def test_a_pattern_is_measured_beside_attention_under_its_mask():
    layout = Layout((5, 7), 3, patterns.parse_pattern("axial | local:1"))
    case = dataclasses.replace(CASE, window=layout)
    assert count_pairs(layout, 2) == layout.mask.sum() + 2 * 35
    rows = {row.backend: row for row in measure(case, ["blocked", "gathered", *BESIDE], rounds=1)}
    assert rows["blocked"].total_ms > 0
    assert rows["sdpa_masked"].total_ms > 0
    assert rows["gathered"].reason == "it computes windows, not patterns"
    assert rows["blocked"].spec["mask"] == "axial | local:1,max"
    assert measure(CASE, ["sdpa_masked"], rounds=1)[0].reason.startswith("it computes patterns")


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
def test_every_row_has_measurements_or_a_reason(rows):
    assert list(rows) == [*BACKENDS, *BESIDE, FLOOR]
    for name, row in rows.items():
        if row.reason:
            assert row.forward_ms is row.backward_ms is row.extra_mib is row.over_floor is None
            continue
        assert row.forward_ms > 0
        assert row.backward_ms > 0
        assert row.rounds == 2
        assert name == FLOOR or row.peak_mib > row.extra_mib >= 0
    for name, entry in BACKENDS.items():
        assert rows[name].reason == "; ".join(entry.unsupported(CASE))
    assert [name for name, row in rows.items() if row.auto] == [choose(CASE)]


@pytest.mark.long
def test_ratios_are_of_forward_and_backward_together(rows):
    base, full, row = (rows[name] for name in ("chunk_handgrad", "sdpa", "blocked"))
    assert base.over_chunk_handgrad == full.over_sdpa == rows[FLOOR].over_floor == 1
    assert row.over_sdpa == pytest.approx(row.total_ms / full.total_ms)
    assert row.over_floor == pytest.approx(row.total_ms / rows[FLOOR].total_ms)


@pytest.mark.long
def test_rows_can_be_written_as_json_and_describe_the_case(rows):
    row = json.loads(json.dumps(plain(rows.values())))[0]
    spec = dict(grid=[7, 8], window=3, mask="chunks", mode=0, batch=2, heads=2, head_dim=4)
    spec |= dict(num_global=1, dtype="float32", bias=True, device="cpu")
    assert row | spec == row


def test_rows_have_the_mode_of_the_window():
    for mode in range(-1, 9):
        assert mode_of(Window.from_mode((7, 8), 3, 0, mode)) == mode
    assert mode_of(Window((7, 8), 3, 0, ((0, 0), (0, 1), (1, 0)))) is None


def test_a_backend_that_needs_too_much_memory_is_left_out():
    rows = {row.backend: row for row in measure(CASE, ["chunk_handgrad", "sdpa"], 1, max_bytes=1e3)}
    assert rows["chunk_handgrad"].reason.startswith("would need ")
    assert rows["sdpa"].total_ms > 0, "it stores no scores"
    assert rows["sdpa"].over_chunk_handgrad is None
    assert rows["sdpa"].over_floor > 0


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


def test_an_unknown_backend_is_rejected_with_the_choices():
    with pytest.raises(ValueError, match="did you mean 'blocked'.*sdpa, sdpa_masked, natten"):
        measure(CASE, ["bloked"], 1)


def test_natten_has_reasons_against_other_cases():
    exact = dataclasses.replace(CASE, window=Window((7, 8), 3, 1), device="cuda")
    assert not any("exact window" in reason for reason in natten_reasons(exact))
    assert any("exact window" in reason for reason in natten_reasons(CASE))
    assert any("CUDA" in reason for reason in natten_reasons(CASE))
    small = dataclasses.replace(exact, window=Window((6, 8), 3, 1))
    assert any("7 x 7 is larger than the grid" in reason for reason in natten_reasons(small))


class Clock:
    """A clock that only candidates advance."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr("vil.utils.timing.time.perf_counter", lambda: self.now)

    def candidate(self, name, *took, least=0.0):
        """Takes `took` seconds in its calls, the last value in all further ones."""
        times = list(took)

        def forward():
            self.calls.append(name)
            self.now += times.pop(0) if len(times) > 1 else times[0]

        return Candidate(forward, lambda out: (), least)


def test_candidates_take_turns_and_the_first_round_only_warms_up(monkeypatch):
    clock = Clock(monkeypatch)
    runs = {name: clock.candidate(name, 9.0, 1.0, 3.0, 2.0) for name in "ab"}
    times, dropped = time_interleaved(runs, 3, CPU)
    assert clock.calls == list("ab" * 4)
    assert times["a"].forward == [1.0, 3.0, 2.0]
    assert times["a"].forward_ms == times["a"].total_ms == 2000.0
    assert not dropped


def test_a_call_before_the_timed_one_is_not_timed(monkeypatch):
    clock = Clock(monkeypatch)
    candidate = clock.candidate("a", 9.0, 1.0, 5.0, 2.0, 7.0, 3.0)
    candidate = dataclasses.replace(candidate, before=candidate.forward)
    times, _ = time_interleaved({"a": candidate}, 2, CPU)
    assert clock.calls == ["a"] * 6
    assert times["a"].forward == [2.0, 3.0]


def test_too_slow_candidates_are_dropped_and_slow_ones_run_less_often(monkeypatch):
    clock = Clock(monkeypatch)
    runs = {
        "known": clock.candidate("known", 1e3, least=700.0),
        "slow": clock.candidate("slow", 200.0),
        "fast": clock.candidate("fast", 10.0),
        "compiles": clock.candidate("compiles", 999.0, 10.0),
        "hopeless": clock.candidate("hopeless", 601.0),
        "exempt": clock.candidate("exempt", 0.1),
    }
    times, dropped = time_interleaved(runs, 6, CPU, exempt=["exempt"])
    assert set(dropped) == {"known", "hopeless"}
    assert "known" not in clock.calls, "its products alone would have taken too long"
    assert clock.calls.count("hopeless") == 2
    rounds = {name: len(taken.forward) for name, taken in times.items()}
    assert rounds == {"slow": 2, "fast": 6, "compiles": 6, "exempt": 6}


def test_no_candidate_of_less_than_a_second_is_slow(monkeypatch):
    clock = Clock(monkeypatch)
    runs = {"fast": clock.candidate("fast", 1e-3), "slow": clock.candidate("slow", 0.9)}
    times, dropped = time_interleaved(runs, 4, CPU)
    assert not dropped
    assert len(times["slow"].forward) == 4


def test_memory_leaves_out_the_output_and_the_gradients():
    x = torch.ones(2**18, requires_grad=True)  # 1 MiB

    def forward():
        return x * torch.empty(2**19)[: 2**18]  # 2 MiB that are needed, 1 MiB of output

    one = Candidate(forward, lambda out: torch.autograd.grad(out, [x], torch.ones(())))
    one = dataclasses.replace(one, backward=lambda out: [x.detach() * 2])
    peak, extra = peak_bytes(one, CPU)
    assert peak == pytest.approx(4 * 2**20, rel=0.01)
    assert extra == pytest.approx(2 * 2**20, rel=0.01)
