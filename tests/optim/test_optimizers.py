"""Every optimizer trains, uses its settings and keeps the weight decay of the groups."""

import importlib.util

import pytest
import torch
from torch import nn

from vil.engine.nonfinite import update
from vil.optim import OPTIMIZERS, build_optimizer, decay_groups

pytestmark = pytest.mark.smoke

INSTALLED = [name for name in OPTIMIZERS if not name.startswith("apex")]
FIRST_STEP = {"qhm": 0.01}  # all others: the learning rate of 0.1


def one_weight(value=1.0, dtype=torch.float64):
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def descend(name, gradients, weight_decay=0.0, start=1.0, **settings):
    """The value of a single weight after steps with the given gradients."""
    weight = one_weight(start)
    optimizer = build_optimizer(name, decay_groups([("w", weight)], weight_decay, 0.0), **settings)
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    return weight.item()


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_goes_downhill_in_every_precision(name, dtype):
    weight = one_weight(dtype=dtype)
    optimizer = build_optimizer(name, decay_groups([("w", weight)], 0.0, 0.0), lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.item() == pytest.approx(1 - FIRST_STEP.get(name, 0.1), rel=1e-2)


@pytest.mark.parametrize("name", INSTALLED)
def test_weight_decay_applies_to_its_group_only(name):
    """With zero gradients only decay changes a weight."""
    decayed, spared, idle = one_weight(), one_weight(), one_weight()
    named = [("decayed", decayed), ("spared", spared), ("idle", idle)]
    optimizer = build_optimizer(name, decay_groups(named, 0.5, 0.0, {"spared"}), lr=0.1)
    decayed.grad, spared.grad = torch.zeros_like(decayed), torch.zeros_like(spared)
    for _ in range(2):
        optimizer.step()
    assert 0 < decayed.item() < 1
    assert spared.item() == idle.item() == 1


def adam_by_hand(gradients, lr, betas, eps):
    weight, m, v = 1.0, 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        weight -= lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)) ** 0.5 + eps)
    return weight


@pytest.mark.defect("B8")
@pytest.mark.parametrize("name", ["adam", "adamw", "lamb"])
def test_betas_and_eps_are_used(name):
    settings = {"lr": 0.1, "betas": (0.5, 0.7), "eps": 0.3}
    gradients = [1.0, -0.2, 0.4]
    expected = adam_by_hand(gradients, **settings)
    assert descend(name, gradients, **settings) == pytest.approx(expected)


def test_a_skipped_first_step_leaves_no_momentum():
    """torch's fused SGD allocates it in the first step, and would not write to it."""
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = build_optimizer("sgd", [{"params": [("w", weight)]}], lr=0.1, momentum=0.9)
    for found, expected in ((1.0, 1.0), (0.0, 0.9), (0.0, 0.71)):
        weight.grad = torch.ones(1000)
        update(optimizer, torch.tensor(found))
        torch.testing.assert_close(weight.detach(), torch.full((1000,), expected))
        if found:
            assert not optimizer.state[weight]["momentum_buffer"].any()


def test_unknown_names_and_frozen_models_are_rejected():
    groups = decay_groups([("w", one_weight())], 0.0, 0.0)
    with pytest.raises(ValueError, match="did you mean 'adamw'"):
        build_optimizer("adamww", groups, lr=0.1)
    with pytest.raises(ValueError, match="frozen"):
        build_optimizer("adamw", [], lr=0.1)


def test_qhm_by_hand():
    unit = {"lr": 0.1, "momentum": 0.9}
    assert descend("qhm", [1, 1, 1], **unit) == pytest.approx(0.9439)  # the number of the 2021 code
    h1, h2 = 0.1 * 2, 0.9 * 0.1 * 2 + 0.1 * -1
    expected = 1 - 0.1 * (0.3 * 2 + 0.7 * h1) - 0.1 * (0.3 * -1 + 0.7 * h2)
    assert descend("qhm", [2, -1], nu=0.7, **unit) == pytest.approx(expected)
    decayed = descend("qhm", [1], weight_decay=0.5, nu=0.0, lr=0.1)
    assert decayed == pytest.approx(1 - 0.1 * 1.5)
    with pytest.raises(ValueError, match="momentum < 1, got momentum 1.0"):
        descend("qhm", [], lr=0.1, momentum=1.0)


@pytest.mark.defect("B8")
def test_lamb_by_hand_with_decay():
    """Adam's update plus decay, scaled to the norm of the weights."""
    weight = nn.Parameter(torch.tensor([3.0, -4.0], dtype=torch.float64))
    optimizer = build_optimizer("lamb", decay_groups([("w", weight)], 0.1, 0.0), lr=0.01, eps=0.5)
    weight.grad = torch.tensor([20.0, 2.0], dtype=torch.float64)  # not clipped to norm 1
    update = torch.tensor([20 / 20.5 + 0.3, 2 / 2.5 - 0.4], dtype=torch.float64)
    expected = weight.detach() - 0.01 * 5 * update / update.norm()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)


def test_larc_is_sgd_with_momentum_where_lr_is_below_its_bound():
    """0.001 |p| / (|g| + decay |p|) starts at 0.5 and stays above lr."""
    settings = {"weight_decay": 1e-3, "lr": 0.1, "momentum": 0.9}
    small = [1e-3, 2e-3, -1e-3]
    assert descend("larc", small, **settings) == descend("sgd", small, **settings)


@pytest.mark.parametrize(("name", "lr"), [("larc", 1.0), ("lars", 0.1)])
def test_the_bound_of_larc_and_the_scale_of_lars(name, lr):
    scale = 0.001 * 2 / (3 + 0.5 * 2)
    expected = 2 - lr * scale * (3 + 0.5 * 2)
    after = descend(name, [3], weight_decay=0.5, start=2.0, lr=0.1, eps=0.0)
    assert after == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["lamb", "lars", "larc"])
def test_without_any_decay_a_warning_says_that_nothing_is_adapted(name, caplog):
    build_optimizer(name, decay_groups([("w", one_weight())], 0.1, 0.0), lr=0.1)
    assert caplog.text == ""
    build_optimizer(name, decay_groups([("w", one_weight())], 0.0, 0.0), lr=0.1)
    assert f"no parameter group has weight decay. Without it, {name} is" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("apex") is not None, reason="apex is installed")
@pytest.mark.parametrize("name", ["apex_lamb", "apex_adam"])
def test_apex_is_rejected_if_not_installed(name):
    groups = decay_groups([("w", one_weight())], 0.1, 0.0)
    with pytest.raises(ValueError, match="NVIDIA's apex, which is not installed.*PyPI"):
        build_optimizer(name, groups, lr=0.1)
