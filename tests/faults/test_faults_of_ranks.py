"""Dead ranks are restarted, hanging ranks reported; a NaN on one rank skips the step on all."""

import torch
from safetensors.torch import load_file

from tests.common.faults.real_runs import (
    ELASTIC,
    begin,
    end_all,
    said,
    saved_step,
    status,
    wait_for_end,
)
from tests.common.faults.records import record, repeats
from tests.common.small_runs import TINY, checkpoint, metrics

SHORT = (*TINY, "OPTIM.EPOCHS=4", "OPTIM.EMA=0.9", "RUN.SAVE_STEPS=3")
RESTARTS = ("--max-restarts=1",)


def equal(folder, other):
    return all(
        torch.equal(mine, theirs)
        for file in ("model.safetensors", "ema.safetensors")
        for mine, theirs in zip(
            load_file(checkpoint(folder) / file).values(),
            load_file(checkpoint(other) / file).values(),
        )
    )


def test_f7_a_rank_is_killed_and_the_launcher_starts_again(tmp_path):
    whole = tmp_path / "whole"
    process = begin(whole, *SHORT, dist=2)
    wait_for_end(process)
    assert process.returncode == 0, said(whole)
    finished, count = 0, repeats(10)
    for number in range(count):
        folder = tmp_path / str(number)
        fault = {"what": "kill", "rank": number % 2, "step": 1 + number}
        words = (*SHORT, "--resume")
        process = begin(folder, *words, dist=2, launcher=RESTARTS, fault=fault, **ELASTIC)
        wait_for_end(process)
        end_all(process)
        finished += process.returncode == 0 and equal(folder, whole)
    what = f"restarted runs that finish with the weights of the uninterrupted run (of {count})"
    record("F7", what, finished, count)


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


def test_f11_a_nan_loss_on_one_rank(tmp_path):
    together, count = 0, repeats(5)
    for number in range(count):
        folder = tmp_path / str(number)
        fault = {"what": "nan", "rank": number % 2, "step": 3}
        process = begin(folder, *TINY, dist=2, fault=fault)
        wait_for_end(process)
        end_all(process)
        assert process.returncode == 0, said(folder)
        weights = load_file(checkpoint(folder) / "model.safetensors").values()
        finite = all(weight.isfinite().all() for weight in weights)
        skipped = metrics(folder, "train")[-1].get("skipped")
        together += finite and skipped == 1 and saved_step(folder) == 8
    record("F11", f"runs in which both ranks skip the step (of {count})", together, count)
