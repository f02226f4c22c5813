"""Streamed maps of images whose sides are no multiples of the strides equal those of images that
are padded to a multiple."""

import pytest
import torch
import torch.nn.functional as F

from tests.common.streaming import FP32, FP64, largest_difference, make_image, make_model
from vil.errors import ConfigError
from vil.streaming import prepare
from vil.streaming.checks import padded_grid
from vil.utils.timing import peak_tensor_bytes

ARCH = "l1,h1,d4,n2,s1,g1,p4,f3,a{a}_l2,h2,d8,n2,s1,g1,p2,f2,a{a}_l3,h2,d8,n2,s{s},g1,p3,f5,a{a}"
SIZES = [(24, 48), (131, 47), (61, 250), (3, 1), (97, 25)]


def run_padded(model, image):
    """The maps of all stages, without the tokens entirely in the padding."""
    height, width = image.shape[1:]
    bottom, right = (-n % model.strides[-1] for n in (height, width))
    padded = F.pad(image[None], (0, right, 0, bottom))
    valid = torch.tensor([[height, width]])
    with torch.no_grad():
        maps = model.forward_intermediates(padded, intermediates_only=True, valid=valid)
    cut = {}
    for i, (each, grid) in enumerate(zip(maps, model.grids((height, width), pad=True))):
        assert each.shape[-2:] == padded_grid(model, i, grid)
        cut[f"stages.{i}"] = each[0, :, : grid[0], : grid[1]]
    return cut


@pytest.mark.parametrize(
    ("absolute", "local", "size"),
    [(n // 2 % 2, n % 2, SIZES[n % len(SIZES)]) for n in range(8)],
    ids=str,
)
def test_padded_images(absolute, local, size):
    model, image = make_model(ARCH.format(a=absolute, s=local)), make_image(size)
    expected = run_padded(model, image)
    run = prepare(model, image, outputs=tuple(expected), pad=True)
    for num_chunks in (1, 3, 99):
        found = run.execute(run.planner.with_strips(num_chunks)).outputs
        # with `valid`, the bias tables of full attention are interpolated in float32
        assert largest_difference(found, expected) <= (FP64 if local else FP32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_plan_bounds_the_memory(dtype):
    """Pixels take most of it, with and without a copy to the dtype of the model."""
    model = make_model("l1,h1,d4,n1,s1,g1,p32,f3,a1")
    run = prepare(model, make_image((301, 2003), dtype=dtype), outputs=("stages.0",), pad=True)
    plan = run.planner.choose(2**26)
    peak = peak_tensor_bytes(lambda: run.execute(plan), torch.device("cpu"))
    assert 0.5 * plan.peak_bytes < peak <= plan.peak_bytes


def test_a_window_that_wraps_around_padding():
    model = make_model(ARCH.format(a=0, s=1), sw_exact=-1)
    assert prepare(model, make_image((93, 95)), outputs=("stages.2",), pad=True)
    with pytest.raises(ConfigError, match=r"stages\.0\.blocks\.0\.attn cannot .* wraps around"):
        prepare(model, make_image((24 * 3 + 4, 48)), outputs=("stages.2",), pad=True)
