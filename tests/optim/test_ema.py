"""Ema equals the closed form of an exponential moving average, in a separate model."""

import pytest
import torch
from torch import nn

from vil.optim import Ema

pytestmark = pytest.mark.smoke

GOOD, BAD = torch.tensor([0.0, 1.0], dtype=torch.float64)  # flags of a good and a skipped step


def small_model():
    """A model with a shared weight, a frozen bias and batch norm."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.9999])
def test_the_average_is_the_closed_form(decay):
    torch.manual_seed(0)
    model = small_model()
    ema = Ema(model, decay)
    weights = [model[0].weight.detach().clone()]
    for _ in range(7):
        with torch.no_grad():
            model[0].weight.add_(torch.randn(3, 3))
        ema.update(GOOD)
        weights.append(model[0].weight.detach().clone())
    expected = decay**7 * weights[0]
    for step in range(1, 8):
        expected = expected + (1 - decay) * decay ** (7 - step) * weights[step]
    torch.testing.assert_close(ema.model[0].weight, expected, rtol=1e-12, atol=1e-12)
    before = ema.model[0].weight.clone()
    ema.update(BAD)
    assert torch.equal(ema.model[0].weight, before)
    assert ema.model[2].weight is ema.model[0].weight
    assert torch.equal(ema.model[2].bias, model[2].bias)


def test_buffers_are_copied_and_the_model_is_unchanged():
    model = small_model()
    ema = Ema(model, 0.9)
    model(torch.randn(8, 3).double())
    ema.update(GOOD)
    assert torch.equal(ema.model[1].running_mean, model[1].running_mean)
    assert ema.model[1].num_batches_tracked == 1
    assert model.training
    assert not ema.model.training
    assert model[0].weight.requires_grad
    assert not any(p.requires_grad for p in ema.model.parameters())
    assert list(ema.model.state_dict()) == list(model.state_dict())


def test_restart_copies_the_current_weights():
    model = small_model()
    ema = Ema(model, 0.9)
    with torch.no_grad():
        model[0].weight.add_(1)
    ema.restart()
    assert torch.equal(ema.model[0].weight, model[0].weight)
    assert ema.model[0].weight is not model[0].weight


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_out_of_range_is_rejected(decay):
    with pytest.raises(ValueError, match="must be at least 0 and less than 1"):
        Ema(nn.Linear(1, 1), decay)
