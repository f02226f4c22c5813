"""When lines are logged, the first sign of progress, the remaining time, and the hint on data."""

import pytest

from vil.engine import logger
from vil.engine.logger import RunLogger
from vil.engine.meter import is_line_due
from vil.engine.remaining_time import RemainingTime

pytestmark = pytest.mark.smoke
METRICS = {"loss": 2.0, "time": 1.0, "data": 0.0}


def lines(end, per_epoch, log_freq):
    sizes = dict(end=end, per_epoch=per_epoch, log_freq=log_freq)
    return [step for step in range(1, end + 1) if is_line_due(step, **sizes)]


@pytest.mark.parametrize(
    ("end", "per_epoch", "log_freq", "expected"),
    [
        (22, 11, 10, [11, 22]),
        (50, 25, 10, [10, 25, 35, 50]),
        (9, 3, 10, [3, 6, 9]),
        (26, 20, 4, [4, 8, 12, 16, 20, 26]),  # ended by max_steps
        (1, 44, 44, [1]),
    ],
)
def test_a_line_averages_enough_steps(end, per_epoch, log_freq, expected):
    assert lines(end, per_epoch, log_freq) == expected


def test_the_remaining_time_follows_the_steps():
    left = RemainingTime(0, 100, now=0.0)
    assert left.update(10, 5.0, now=50.0) == pytest.approx(450)  # compiling
    assert left.update(20, 1.0, now=60.0) == pytest.approx(80)  # forgotten
    assert left.update(30, 2.0, now=80.0) == pytest.approx(70 * 1.5)
    later = left.update(40, 9.0, now=170.0)
    assert 60 * 1.5 < later < 60 * 9  # smoothed


def test_the_remaining_time_includes_evaluations():
    left = RemainingTime(100, 300, now=7.0)
    left.update(150, 1.0, now=57.0)
    # an evaluation of 50 seconds every 50 steps doubles the time
    assert left.update(200, 1.0, now=157.0) == pytest.approx(100 * 1.5)
    assert left.update(250, 1.0, now=257.0) == pytest.approx(50 * (1 + 100 / 150))


@pytest.fixture
def clock(monkeypatch):
    """The logger's clock, which the test advances."""
    now = [1000.0]
    monkeypatch.setattr(logger.time, "monotonic", lambda: now[0])
    return now


def opened(folder, **options):
    log = RunLogger(folder, enabled=True)
    log.begin(0, 1000, steps_per_epoch=500, batch_size=8, **options)
    return log


def shown(log):
    log.close()
    lines = (log.folder / "log.txt").read_text().splitlines()
    return [line.split(" ", 1)[1] for line in lines]


@pytest.mark.parametrize(
    ("seconds", "step", "per_step"), [(0.5, 20, 0.5), (4.0, 3, 4.0), (9.85, 2, 9.85)]
)
def test_there_is_a_line_within_twenty_seconds(seconds, step, per_step, tmp_path, clock):
    """The first step takes a little longer; the estimate leaves it out if there is another."""
    log = opened(tmp_path)
    for number in range(1, 200):
        clock[0] += seconds + (number == 1) * 0.1
        log.first_progress(number)
    (line,) = shown(log)
    assert line.startswith(f"train epoch {step / 500:.2f}/2 step {step}/1000 eta ")
    assert f"time {per_step:.3f} img/s {8 / per_step:.1f}" in line
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_an_estimate_from_the_first_step_is_corrected_after_the_second(tmp_path, clock):
    """The first step waits for the start of the loader workers."""
    log = opened(tmp_path)
    for number, seconds in enumerate((15.0, 0.5, 0.5, 0.5), 1):
        clock[0] += seconds
        log.first_progress(number)
    first, second = shown(log)
    assert "step 1/1000 eta 4:09:45 (overestimated: the first step includes" in first
    assert second == "train epoch 0.00/2 step 2/1000 eta 0:08:19 time 0.500 img/s 16.0"


def test_there_is_no_extra_line_after_a_regular_one(tmp_path, clock):
    log = opened(tmp_path)
    log.training(1, 0.1, METRICS)
    clock[0] += 60
    log.first_progress(2)
    assert len(shown(log)) == 1


def test_waiting_for_data_gives_a_hint_once(tmp_path):
    log = opened(tmp_path)
    slow = {**METRICS, "data": 0.3}
    for step, point in enumerate((slow, METRICS, slow, slow), 1):
        log.training(10 * step, 0.1, point)
    hints = [(at, line) for at, line in enumerate(shown(log)) if line.startswith("hint")]
    assert [at for at, _ in hints] == [3]
    assert "steps wait for data 30 %" in hints[0][1]
