"""Interleaved timing: candidates take turns, slow ones run less often, memory is measured."""

import dataclasses

import pytest
import torch

from vil.utils.interleaved_timer import Candidate, peak_bytes, time_interleaved

CPU = torch.device("cpu")


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


def test_memory_leaves_out_the_output_and_the_gradients():
    x = torch.ones(2**18, requires_grad=True)  # 1 MiB

    def forward():
        return x * torch.empty(2**19)[: 2**18]  # 2 MiB that are needed, 1 MiB of output

    one = Candidate(forward, lambda out: torch.autograd.grad(out, [x], torch.ones(())))
    one = dataclasses.replace(one, backward=lambda out: [x.detach() * 2])
    peak, extra = peak_bytes(one, CPU)
    assert peak == pytest.approx(4 * 2**20, rel=0.01)
    assert extra == pytest.approx(2 * 2**20, rel=0.01)
