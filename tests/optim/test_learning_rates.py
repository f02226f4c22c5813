"""The learning rate scales with the batch size."""

import logging

import pytest
import torch
from torch import nn

from vil.config import get_config
from vil.optim.build import build_optimization, build_schedule, warn_long_average
from vil.optim.learning_rates import default_scaling

pytestmark = pytest.mark.smoke

DROPS = ("SOLVER.LR_POLICY=multistep", "OPTIM.LR=1e-3", "OPTIM.EPOCHS=150")


def build(options):
    cfg = get_config(None, options)
    optim = build_optimization(cfg, nn.Linear(2, 2), torch.device("cpu"))
    return optim.lr, build_schedule(cfg, optim.name, optim.lr, 10)


@pytest.mark.parametrize(
    ("optimizer", "scaling", "factor"),
    [
        ("sgd", "auto", 0.25), ("adamw", "auto", 0.5), ("lamb", "auto", 0.5),
        ("timm/nadamw", "auto", 0.5), ("timm/lion", "auto", 0.25),
        ("adamw", "linear", 0.25), ("sgd", "sqrt", 0.5),
    ],
)  # fmt: skip
def test_lr_and_min_lr_scale_with_the_images_of_a_step(optimizer, scaling, factor):
    lr, _ = build(
        [f"OPTIM.OPT={optimizer}", "OPTIM.LR=0.01", "SOLVER.MIN_LR=1e-4", "DATALOADER.BSZ=64",
         "OPTIM.ACCUMULATE=4", "OPTIM.LR_REFERENCE_BATCH=1024", f"OPTIM.LR_SCALING={scaling}"]
    )  # fmt: skip
    assert (lr.peak, lr.final) == (pytest.approx(0.01 * factor), pytest.approx(1e-4 * factor))


def test_muon_scales_linearly_and_adamuon_with_the_root():
    names = ("qhm", "lars", "timm/muon", "timm/adamuon")
    assert [default_scaling(name) for name in names] == ["linear"] * 3 + ["sqrt"]


def test_without_a_reference_the_rate_is_unchanged():
    lr, schedule = build(["OPTIM.LR=0.3", "SOLVER.MIN_LR=0.1", "DATALOADER.BSZ=7"])
    assert lr == (0.3, 0.1, "")
    assert schedule.lr_at(0) == 0.3


def test_the_schedule_uses_the_scaled_rates():
    options = ["OPTIM.LR=0.1", "OPTIM.LR_REFERENCE_BATCH=64", "DATALOADER.BSZ=128", "OPTIM.OPT=sgd",
               "SOLVER.LR_POLICY=linear", "SOLVER.MIN_LR=0.01", "SOLVER.WARMUP_EPOCHS=0",
               "OPTIM.EPOCHS=1"]  # fmt: skip
    _, schedule = build(options)
    assert (schedule.lr_at(0), schedule.lr_at(10)) == (0.2, 0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["OPTIM.LR=1e-3", "OPTIM.LR_REFERENCE_BATCH=1024", "DATALOADER.BSZ=256"],
         "peak learning rate 0.0005 = OPTIM.LR 0.001 x sqrt(256 / 1024)"),
        ([], "OPTIM.LR is 1, the default, which is too high for adamw"),
        (["OPTIM.OPT=sgd"], ""),
        (["OPTIM.LR=1e-3", "OPTIM.DROP_FACTOR=0.1", "SOLVER.LR_POLICY=multistep"],
         "0.1 multiplies the learning rate by 10; set 10"),
        (["OPTIM.LR=1e-3", "OPTIM.DROP_FACTOR=0.1", "SOLVER.LR_POLICY=cosine"], ""),
        (["OPTIM.DROP_EPOCHS=[3,150,150.5]", *DROPS],
         "OPTIM.DROP_EPOCHS 150, 150.5: the learning rate does not drop there"),
        (["OPTIM.DROP_FREQ=150", *DROPS], "OPTIM.DROP_FREQ 150: the learning rate does not"),
        (["OPTIM.DROP_EPOCHS=[3,149.5]", *DROPS], ""),
        (["OPTIM.DROP_FREQ=149", *DROPS], ""),
    ],
)  # fmt: skip
def test_the_log_tells_of_the_learning_rate(options, message, caplog):
    caplog.set_level(logging.INFO)
    build(options)
    assert message in caplog.text
    assert bool(message) == bool(caplog.records)


@pytest.mark.parametrize(
    ("decay", "epochs", "said"),
    [
        (0.9999, 4, "OPTIM.EMA 0.9999 is too large for a run of 176 steps: 98 % of the averaged"),
        (0.999, 40, "of 1760 steps: 17 %"),
        (0.999, 100, ""),
        (0.97, 4, ""),  # what the first case proposes
        (0.0, 1, ""),
    ],
)
def test_an_average_longer_than_the_run_is_a_warning(decay, epochs, said, caplog):
    cfg = get_config(opts=[f"OPTIM.EMA={decay}", f"OPTIM.EPOCHS={epochs}"])
    warn_long_average(cfg, 44)
    assert [said in message for message in caplog.messages] == [True] * bool(said)
    if epochs == 4 and said:
        assert "at most 0.974, or to 0" in caplog.text
