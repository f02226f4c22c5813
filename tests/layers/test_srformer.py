"""Spatial reduction on maps with incomplete cells, and on a single cell."""

import pytest
import torch
from torch import Tensor, nn

import vil

pytestmark = pytest.mark.smoke


def build(**own) -> nn.Module:
    torch.manual_seed(0)
    module = vil.build_attention("srformer", dim=8, num_heads=2, **({"ratio": 3} | own))
    return module.double()


@pytest.mark.defect("B20")
@pytest.mark.parametrize(("ragged", "attended"), [("pad", True), ("drop", False)])
def test_whether_tokens_of_incomplete_cells_are_attended(ragged, attended):
    module, x = build(ragged=ragged), torch.randn(1, 36, 8, dtype=torch.float64)
    before = module(x, (7, 5))[:, 0]
    x[:, -1] += 5.0
    assert torch.equal(module(x, (7, 5))[:, 0], before) != attended


def test_pad_and_drop_are_equal_without_incomplete_cells():
    x = torch.randn(2, 1 + 54, 8, dtype=torch.float64)
    assert torch.equal(build(ragged="pad")(x, (6, 9)), build(ragged="drop")(x, (6, 9)))


@pytest.mark.defect("B20")
@pytest.mark.parametrize("ragged", ["pad", "drop"])
def test_a_single_cell_is_not_normalized(ragged):
    """The instance norm of one position is zero."""
    module, x = build(ragged=ragged), torch.randn(1, 1 + 4, 8, dtype=torch.float64)
    before = module(x, (2, 2))[:, 0]
    x[:, -1] += 5.0
    assert not torch.allclose(module(x, (2, 2))[:, 0], before)


def test_images_of_several_sizes_in_one_batch_equal_each_alone():
    """One cell, some, and all of the padded map: each is normalized over its cells."""
    module, sizes = build(), [(2, 3), (4, 5), (7, 5)]
    batch = torch.full((3, 7, 5, 8), 50.0, dtype=torch.float64)
    global_token = torch.randn(1, 1, 8, dtype=torch.float64)
    images = [torch.randn(1, *size, 8, dtype=torch.float64) for size in sizes]
    for row, image in zip(batch, images):
        row[: image.shape[1], : image.shape[2]] = image[0]
    tokens = torch.cat([global_token.expand(3, -1, -1), batch.flatten(1, 2)], dim=1)
    found = module(tokens, (7, 5), valid_hw=torch.tensor(sizes))
    for out, image, size in zip(found, images, sizes):
        alone = module(torch.cat([global_token, image.flatten(1, 2)], dim=1), size)[0]
        assert torch.allclose(crop(out, size), alone)


def crop(out: Tensor, size: tuple[int, int]) -> Tensor:
    local = out[1:].unflatten(0, (7, 5))[: size[0], : size[1]].flatten(0, 1)
    return torch.cat([out[:1], local])
