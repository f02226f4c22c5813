"""A window larger than the grid costs what the grid costs, and computes the same."""

from itertools import product

import pytest
import torch

from vil.ops import LocalBias, Window, local_attention, reference
from vil.ops.window import Mask, real_cells

pytestmark = pytest.mark.trust(10)

CASES = [
    (grid, size, mask, mode)
    for grid, size, mask, mode in product([(3, 4), (4, 4), (2, 5)], [5, 7], [1, 0, -1], [0, -1, 3])
    if mask != Mask.EXACT or mode == 0
] + [((4, 4), 4, -1, mode) for mode in (0, -1, 3)]


def inputs(grid, size, num_global=1, table=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    length = grid[0] * grid[1]
    k, v = (draw(2, 2, num_global + length, 3) for _ in range(2))
    bias = LocalBias(
        draw(2, (4 * size - 1) ** 2) if table else None, draw(2, num_global) if num_global else None
    )
    return draw(2, 2, length, 3), k, v, bias


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("num_global", [0, 1])
@pytest.mark.parametrize(("grid", "size", "mask", "mode"), CASES)
def test_output_and_gradients_are_the_reference(grid, size, mask, mode, num_global, table):
    window = Window.from_mode(grid, size, mask, mode)
    q, k, v, bias = inputs(grid, size, num_global, table)
    valid_hw = torch.tensor([grid, (grid[0] - 1, max(1, grid[1] - 2))])
    real = real_cells(valid_hw, grid).flatten(2)[..., None]
    leaves = [x for x in (q, k, v, *bias) if x is not None]
    found = []
    for attend in (local_attention, reference.attend):
        out = attend(q, k, v, window, num_global=num_global, bias=bias, valid_hw=valid_hw) * real
        grads = torch.autograd.grad((out * out.detach().cos()).sum(), leaves, allow_unused=True)
        zeros = (torch.zeros_like(x) for x in leaves)
        found.append([out, *(z if g is None else g for g, z in zip(grads, zeros))])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_no_images_give_gradients_of_zero():
    q, k, v, bias = inputs((4, 4), 2)
    none = [x[:0].detach().requires_grad_() for x in (q, k, v)]
    out = local_attention(*none, Window((4, 4), 2), num_global=1, bias=bias)
    assert out.shape == (0, 2, 16, 3)
    out.sum().backward()
    assert not bias.table.grad.any()
    assert none[1].grad.shape == none[1].shape


@pytest.mark.parametrize("shape", [(1, 1, 16, 0), (1, 0, 16, 3), (16, 3)])
def test_no_heads_and_no_channels_are_refused(shape):
    x = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"q must be \(B, N, L, D\) with at least one head and"):
        local_attention(x, x, x, Window((4, 4), 2))
