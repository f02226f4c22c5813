"""Pooled features are what the head of a model gets, for models of three libraries."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from vil.models.features import pooled_and_map, pooled_features
from vil.pretrained.get_model import get_model

IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
TORCHVISION = torchvision.models.get_model


@pytest.mark.parametrize(
    ("build", "head"),
    [
        (lambda: get_model("vil_nano", img_size=64, num_classes=5), "head"),
        (lambda: timm.create_model("test_vit", img_size=64, num_classes=5), "head"),
        (lambda: timm.create_model("test_resnet", num_classes=5), "fc"),
        (lambda: TORCHVISION("resnet18", num_classes=5), "fc"),
        (lambda: TORCHVISION("mobilenet_v3_small", num_classes=5), "classifier.3"),
    ],
    ids=["vil", "timm vit", "timm resnet", "resnet18", "mobilenet"],
)
@torch.no_grad()
def test_the_head_maps_features_to_logits(build, head):
    model = build().eval()
    features = pooled_features(model, IMAGES)
    assert features.ndim == 2
    torch.testing.assert_close(model.get_submodule(head)(features), model(IMAGES))


@torch.no_grad()
def test_a_convolutional_head_gets_a_map_which_is_averaged():
    model = TORCHVISION("squeezenet1_1", num_classes=5).eval()
    assert pooled_features(model, IMAGES).shape == (2, 512)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_does_not_call_its_head():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return x.mean((2, 3))

    with pytest.raises(ValueError, match="Odd does not call its classification head"):
        pooled_features(Odd(), IMAGES)


@pytest.mark.parametrize(
    ("name", "size", "grid"),
    [("hiera_tiny_224", 224, 7), ("sam2_hiera_tiny", 64, 2), ("test_vit", 160, 10)],
)
@torch.no_grad()
def test_the_map_is_that_of_the_last_stage(name, size, grid):
    model = timm.create_model(name, num_classes=0).eval()
    pooled, last = pooled_and_map(model, torch.rand(1, 3, size, size))
    assert last.shape[-2:] == (grid, grid)
    assert pooled.shape == (1, last.shape[1])
