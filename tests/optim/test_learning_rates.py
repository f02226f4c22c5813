"""The learning rate scales with the batch size, and an unusual learning rate gives a warning."""

import logging

import pytest

from vil.builders.optim import build_schedule, report_lr, scaled_lr
from vil.config import get_config

pytestmark = pytest.mark.smoke


def config(**options):
    keys = {"OPT": "OPTIM.OPT", "LR": "OPTIM.LR", "REFERENCE": "OPTIM.LR_REFERENCE_BATCH",
            "SCALING": "OPTIM.LR_SCALING", "BSZ": "DATALOADER.BSZ", "MIN_LR": "SOLVER.MIN_LR",
            "ACCUMULATE": "OPTIM.ACCUMULATE"}  # fmt: skip
    return get_config(None, [f"{keys[name]}={value}" for name, value in options.items()])


@pytest.mark.parametrize(
    ("optimizer", "scaling", "factor"),
    [
        ("sgd", "auto", 0.25), ("qhm", "auto", 0.25), ("lars", "auto", 0.25),
        ("adamw", "auto", 0.5), ("lamb", "auto", 0.5), ("timm/nadamw", "auto", 0.5),
        ("timm/lion", "auto", 0.25), ("timm/muon", "auto", 0.25), ("timm/adamuon", "auto", 0.5),
        ("adamw", "linear", 0.25), ("sgd", "sqrt", 0.5),
    ],
)  # fmt: skip
def test_lr_and_min_lr_scale_with_the_images_of_a_step(optimizer, scaling, factor):
    batch = dict(REFERENCE=1024, BSZ=64, ACCUMULATE=4, SCALING=scaling)
    lr = scaled_lr(config(OPT=optimizer, LR=0.01, MIN_LR=1e-4, **batch))
    assert (lr.peak, lr.final) == (pytest.approx(0.01 * factor), pytest.approx(1e-4 * factor))


def test_without_a_reference_the_rate_is_unchanged():
    cfg = config(LR=0.3, MIN_LR=0.1, BSZ=7)
    assert scaled_lr(cfg) == (0.3, 0.1, "")
    assert build_schedule(cfg, 10).lr_at(0) == 0.3


def test_the_schedule_uses_the_scaled_rates():
    options = ["OPTIM.LR=0.1", "OPTIM.LR_REFERENCE_BATCH=64", "DATALOADER.BSZ=128", "OPTIM.OPT=sgd",
               "SOLVER.LR_POLICY=linear", "SOLVER.MIN_LR=0.01", "SOLVER.WARMUP_EPOCHS=0",
               "OPTIM.EPOCHS=1"]  # fmt: skip
    schedule = build_schedule(get_config(None, options), 10)
    assert (schedule.lr_at(0), schedule.lr_at(10)) == (0.2, 0.02)


def test_the_log_has_the_scaled_rate(caplog):
    caplog.set_level(logging.INFO)
    report_lr(config(LR=1e-3, REFERENCE=1024, BSZ=256))
    assert "peak learning rate 0.0005 = OPTIM.LR 0.001 x sqrt(256 / 1024)" in caplog.text
    assert "WARNING" not in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(), "OPTIM.LR is 1, the default. For adamw, this is above the range of published "),
        (dict(LR=0.05), "OPTIM.LR is 0.05. For adamw, this is above"),
        (dict(LR=1e-8, OPT="sgd"), "this is below the range of published recipes, 1e-05 to 10"),
        (dict(LR=0.01, OPT="timm/lion"), "of published recipes, 1e-07 to 0.002"),
        (dict(LR=5e-3, REFERENCE=8, BSZ=128), r"OPTIM.LR is 0.02 after scaling by sqrt(128 / 8). "),
    ],
)
def test_a_rate_outside_of_published_recipes_earns_a_warning(options, message, caplog):
    report_lr(config(**options))
    assert message in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["SOLVER.LR_POLICY=multistep"], True),
        (["OPTIM.VAL=1", "OPTIM.OPT=sgd"], True),
        (["SOLVER.LR_POLICY=multistep", "OPTIM.DROP_FACTOR=2"], False),
        (["SOLVER.LR_POLICY=cosine"], False),
    ],
)
def test_a_drop_that_raises_the_rate_earns_a_warning(words, warned, caplog):
    report_lr(get_config(None, ["OPTIM.LR=1e-3", "OPTIM.DROP_FACTOR=0.1", *words]))
    assert ("0.1 multiplies the learning rate by 10; set 10" in caplog.text) == warned
