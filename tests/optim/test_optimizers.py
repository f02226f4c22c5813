"""Every row of OPTIMIZERS trains, honours its settings and keeps the groups' weight decay."""

import pytest
import torch
from torch import nn

from vil.optim import OPTIMIZERS, build_optimizer, decay_groups


def one_weight(value=1.0, dtype=torch.float64):
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def descend(name, gradients, weight_decay=0.0, **settings):
    """Where a single weight of 1 is after the given gradients."""
    weight = one_weight()
    optimizer = build_optimizer(name, decay_groups([("w", weight)], weight_decay, 0.0), **settings)
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    return weight.item()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_goes_downhill_in_every_precision(name, dtype):
    weight = one_weight(dtype=dtype)
    optimizer = build_optimizer(name, decay_groups([("w", weight)], 0.0, 0.0), lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.item() == pytest.approx(0.9, rel=1e-2)


def test_sgd_by_hand():
    assert descend("sgd", [1, 1], lr=0.1, momentum=0.5) == pytest.approx(1 - 0.1 - 0.15)
    assert descend("sgd", [1], weight_decay=0.5, lr=0.1) == pytest.approx(1 - 0.1 * 1.5)


def adam_by_hand(gradients, lr, betas, eps):
    weight, m, v = 1.0, 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        weight -= lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)) ** 0.5 + eps)
    return weight


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_betas_and_eps_are_honoured(name):
    settings = {"lr": 0.1, "betas": (0.5, 0.7), "eps": 0.3}
    gradients = [1.0, -0.2, 0.4]
    expected = adam_by_hand(gradients, **settings)
    assert descend(name, gradients, **settings) == pytest.approx(expected)


def test_decay_is_decoupled_in_adamw_alone():
    assert descend("adamw", [0.0], weight_decay=0.5, lr=0.1) == pytest.approx(1 - 0.1 * 0.5)
    assert descend("adam", [0.0], weight_decay=0.5, lr=0.1) == pytest.approx(0.9)


def test_each_group_keeps_its_decay_and_its_names():
    groups = decay_groups([("a", one_weight()), ("b", one_weight())], 0.05, 0.01, {"b"})
    optimizer = build_optimizer("adamw", groups, lr=0.1)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.05, 0.01]
    assert [g["param_names"] for g in optimizer.param_groups] == [["a"], ["b"]]


def test_wrong_names_and_frozen_models_are_refused():
    groups = decay_groups([("w", one_weight())], 0.0, 0.0)
    with pytest.raises(ValueError, match="did you mean 'adamw'"):
        build_optimizer("adamww", groups, lr=0.1)
    with pytest.raises(ValueError, match="frozen"):
        build_optimizer("adamw", [], lr=0.1)
