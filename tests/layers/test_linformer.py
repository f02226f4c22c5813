"""Projections of linformer attention on other grids."""

import pytest
import torch

import vil

pytestmark = pytest.mark.smoke


def test_an_enlarged_image_gives_the_same():
    """Each token repeated 2 x 2 gives the same keys and values if the projections are constant."""
    torch.manual_seed(0)
    module = vil.build_attention("linformer", dim=8, num_heads=2, num_features=4, grid=(3, 5))
    with torch.no_grad():
        module.proj_k.copy_(module.proj_k[:1].expand_as(module.proj_k))
    x = torch.randn(2, 16, 8)
    image = x[:, 1:].unflatten(1, (3, 5))
    large = image.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1, 2)
    found = module(torch.cat([x[:, :1], large], dim=1), (6, 10))
    wanted = module(x, (3, 5))
    assert torch.allclose(found[:, 0], wanted[:, 0], atol=1e-6)
    corners = found[:, 1:].unflatten(1, (6, 10))[:, ::2, ::2].flatten(1, 2)
    assert torch.allclose(corners, wanted[:, 1:], atol=1e-6)


def test_shared_projections_are_one_parameter():
    shared, separate = (
        vil.build_attention(
            "linformer", dim=8, num_heads=2, num_features=4, grid=(3, 5), share_kv=share
        )
        for share in (True, False)
    )
    assert separate.state_dict().keys() - shared.state_dict().keys() == {"proj_v"}
    assert separate.proj_v.abs().max() <= 0.5  # uniform within 1 / sqrt(4)
