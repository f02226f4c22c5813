"""When lines are logged."""

import pytest

from tests.common.toy_engine import metrics, toy_train
from vil.engine.meter import is_line_due

pytestmark = pytest.mark.smoke


def lines(end, per_epoch, log_freq):
    sizes = dict(end=end, per_epoch=per_epoch, log_freq=log_freq)
    return [step for step in range(1, end + 1) if is_line_due(step, **sizes)]


@pytest.mark.parametrize(
    ("end", "per_epoch", "log_freq", "expected"),
    [
        (22, 11, 10, [11, 22]),
        (50, 25, 10, [10, 25, 35, 50]),
        (40, 20, 10, [10, 20, 30, 40]),
        (9, 3, 10, [3, 6, 9]),
        (7, 3, 1, [1, 2, 3, 4, 5, 6, 7]),
        (26, 20, 4, [4, 8, 12, 16, 20, 26]),  # ended by max_steps
        (1, 44, 44, [1]),
    ],
)
def test_a_line_averages_enough_steps(end, per_epoch, log_freq, expected):
    assert lines(end, per_epoch, log_freq) == expected


def test_a_run_logs_these_lines(tmp_path):
    toy_train(tmp_path, epochs=2, log_freq=3)
    found = [point for point in metrics(tmp_path) if point["split"] == "train"]
    ends = [point["step"] for point in found]
    per_epoch = ends[-1] // 2
    assert ends == lines(2 * per_epoch, per_epoch, 3)
