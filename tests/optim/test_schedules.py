"""Learning rates equal those of the 2021 code exactly, and depend only on the step."""

import json
from pathlib import Path

import pytest

from vil.optim import SCHEDULES, Schedule

pytestmark = pytest.mark.smoke

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "lr_schedules.json").read_text())


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['policy']}-{c['epochs']}")
def test_every_lr_is_that_of_the_2021_code(case):
    settings = dict(case)
    expected = settings.pop("lrs")
    schedule = Schedule(**settings)
    stride = schedule.steps_per_epoch if schedule.epoch_based else 1
    assert [schedule.lr_at(i * stride) for i in range(len(expected))] == expected


@pytest.mark.defect("B24")
@pytest.mark.parametrize("policy", SCHEDULES)
def test_lr_depends_on_the_step_only(policy):
    schedule = Schedule(policy, lr=0.1, steps_per_epoch=3, epochs=7, warmup_epochs=0.5, drop_freq=2)
    forward = [schedule.lr_at(step) for step in range(21)]
    assert [schedule.lr_at(step) for step in reversed(range(21))] == forward[::-1]
    assert all(0 <= lr <= 0.1 for lr in forward)


def test_an_epoch_based_lr_is_constant_within_the_epoch():
    schedule = Schedule("cosine", lr=1.0, steps_per_epoch=4, epochs=3, epoch_based=True)
    lrs = [schedule.lr_at(step) for step in range(12)]
    assert [len(set(lrs[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len(set(lrs)) == 3


def test_invalid_settings_are_rejected_with_the_choices():
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        Schedule("cosin", lr=0.1, steps_per_epoch=1, epochs=1)
    with pytest.raises(ValueError, match="linear, constant"):
        Schedule("cosine", lr=0.1, steps_per_epoch=1, epochs=1, warmup_method="quadratic")
    with pytest.raises(ValueError, match="drop_freq >= 1"):
        Schedule("multistep", lr=0.1, steps_per_epoch=1, epochs=1, drop_freq=0)
