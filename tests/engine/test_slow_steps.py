"""Advice is given when steps become slow, at any time of a run."""

import pytest

from vil.engine.slow_steps import PATIENCE, WINDOW, SlowSteps


def advice(*runs: tuple[int, float]) -> list[int]:
    """Return the numbers of the steps with advice. runs: (number of steps, seconds of each)."""
    steps = SlowSteps()
    seconds = [each for count, each in runs for _ in range(count)]
    return [step for step, each in enumerate(seconds, start=1) if steps.add(each)]


@pytest.mark.parametrize("before", [WINDOW, 100, 5000])
@pytest.mark.parametrize(("fast", "slow"), [(0.06, 5.9), (0.06, 0.2), (1.0, 2.5), (30.0, 100.0)])
def test_slow_steps_are_found_within_a_minute_or_two_steps(before, fast, slow):
    (found,) = advice((before, fast), (400, slow))
    assert found - before >= 2
    assert (found - before - 2) * slow <= PATIENCE


@pytest.mark.parametrize(
    "times",
    [
        ((3, 9.0), (500, 0.1)),  # the first steps
        ((100, 1.0), (1, 60.0), (100, 1.0)),  # one pause
        ((100, 1.0), (100, 1.9)),
        ((5, 0.1), (1, 0.5)) * 50,
    ],
)
def test_other_steps_give_no_advice(times):
    assert not advice(*times)
