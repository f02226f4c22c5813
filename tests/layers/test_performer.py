"""Performer: approximation of softmax, dependence on the batch, and redrawing of features."""

import pytest
import torch
from torch import Tensor, nn

import vil
from vil.layers.attention import set_progress
from vil.layers.attention.performer import orthogonal_gaussian
from vil.utils.train_step import TrainStep

pytestmark = pytest.mark.smoke


def build(**own) -> nn.Module:
    return vil.build_attention("performer", dim=8, num_heads=2, **({"num_features": 6} | own))


def matrix(module: nn.Module) -> Tensor:
    return module.fast_attention.projection_matrix.clone()


def test_many_features_come_close_to_softmax_attention():
    torch.manual_seed(0)
    full, x = vil.build_attention("full", dim=8, num_heads=2), torch.randn(2, 21, 8)
    wanted, errors = full(x, (4, 5)), {}
    for count in (4, 4000):
        module = build(num_features=count)
        module.load_state_dict(full.state_dict(), strict=False)
        errors[count] = (module(x, (4, 5)) - wanted).norm() / wanted.norm()
    assert errors[4000] < 0.05  # uniform weights have an error of 0.20
    assert errors[4] > 0.2


def test_directions_are_orthogonal_and_lengths_gaussian():
    generator = torch.Generator().manual_seed(0)
    rows = orthogonal_gaussian(4002, 4, generator)
    assert rows.shape == (4002, 4)
    products = rows[:4000].unflatten(0, (1000, 4)) @ rows[:4000].unflatten(0, (1000, 4)).mT
    off = products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-12
    covariance = rows.mT @ rows / len(rows)
    assert torch.allclose(covariance, torch.eye(4, dtype=torch.float64), atol=0.08)
    assert rows.mean(0).abs().max() < 0.06  # without the sign correction it is far from 0
    assert rows.norm(dim=1).square().var() == pytest.approx(8, rel=0.15)  # chi squared, 4 degrees


@pytest.mark.defect("B19")
@pytest.mark.parametrize("batch_max", [False, True])
def test_whether_an_image_depends_on_its_batch(batch_max):
    torch.manual_seed(0)
    module = build(batch_max=batch_max).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    x[1] *= 30
    assert torch.allclose(module(x, (2, 3))[:1], module(x[:1], (2, 3))) != batch_max


def test_large_padding_leaves_gradients_finite():
    module, x = build(), torch.randn(1, 13, 8)
    x[:, 7:] = 1e4
    x.requires_grad_()
    module(x, (4, 3), valid_hw=torch.tensor([[2, 3]]))[:, :7].sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    assert x.grad.isfinite().all()


def redraws(steps: range, steps_per_epoch: int, module: nn.Module) -> list[int]:
    """The steps at which the matrix changes."""
    found, last = [], matrix(module)
    for step in steps:
        epoch = step // steps_per_epoch
        progress = TrainStep(seed=1, step=step, epoch=epoch, steps_per_epoch=steps_per_epoch)
        set_progress(module, progress)
        if not torch.equal(matrix(module), last):
            found.append(step)
        last = matrix(module)
    return found


@pytest.mark.defect("B19")
def test_redraws_every_1_plus_5_epochs_steps_from_the_start_of_each_epoch():
    wanted = [*range(15), 15, 21, 27, 30, 41]  # epochs of 15: periods 1, 6, 11
    assert redraws(range(45), 15, build()) == wanted


@pytest.mark.defect("B19")
def test_the_draw_is_a_function_of_seed_step_and_module():
    def ran(first: int, last: int = 34, seed: int = 1) -> list[Tensor]:
        modules = nn.ModuleList([build(), build()])
        for step in range(first, last + 1):
            progress = TrainStep(seed=seed, step=step, epoch=step // 15, steps_per_epoch=15)
            set_progress(modules, progress)
        return [matrix(module) for module in modules]

    through, resumed = ran(0), ran(34)
    assert all(torch.equal(a, b) for a, b in zip(through, resumed))
    assert not torch.equal(*through)
    assert not torch.equal(through[0], ran(34, seed=2)[0])


def test_neither_forward_nor_evaluation_redraws():
    module = build()
    before = matrix(module)
    module(torch.randn(1, 7, 8), (2, 3))
    set_progress(module.eval(), TrainStep(step=5))
    assert torch.equal(matrix(module), before)
    set_progress(module.train(), TrainStep(step=5))
    assert not torch.equal(matrix(module), before)


def test_it_can_be_built_on_the_meta_device_and_loaded():
    source = build()
    set_progress(source, TrainStep(step=3))
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(matrix(module), matrix(source))
    set_progress(module.double(), TrainStep(step=3))
    assert torch.equal(matrix(module).float(), matrix(source))
