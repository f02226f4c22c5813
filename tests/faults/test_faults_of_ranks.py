"""Dead ranks are restarted, hanging ranks reported; a NaN on one rank skips the step on all."""

from tests.common.faults.real_runs import (
    begin,
    end_all,
    said,
    status,
    wait_for_end,
)
from tests.common.faults.records import record, repeats
from tests.common.small_runs import TINY


def test_f8_a_rank_that_hangs(tmp_path):
    named, count = 0, repeats(5)
    for number in range(count):
        folder = tmp_path / str(number)
        fault = {"what": "sleep", "rank": number % 2, "step": 5}
        words = (*TINY, "OPTIM.EPOCHS=40", "RUN.HANG_SECONDS=4")
        process = begin(folder, *words, dist=2, fault=fault)
        wait_for_end(process)
        end_all(process)
        text = said(folder)
        named += f"rank {number % 2}: no step in 4 s; its main thread is in lie_down" in text
        assert status(folder)["code"] == 6
    what = f"hanging ranks reported with the function in which they hang (of {count})"
    record("F8", what, named, count)
