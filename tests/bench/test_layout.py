"""Layout copies are found with their module and direction, and blocks have none."""

import pytest
import torch
from torch import nn

import vil
from vil.bench.layout_copies import conversions
from vil.bench.module_scopes import ModuleScopes

SIZE = 2 * 6 * 6 * 4  # bytes of Toy's tokens


class Part(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Toy(nn.Module):
    """A part between two linear layers; tokens (2, 6, 6)."""

    def __init__(self, function):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), Part(function), nn.Linear(6, 6))

    def forward(self, x):
        return self.blocks(x).mean(1)


def find(function):
    rows = conversions(Toy(function), torch.randn(2, 6, 6))
    return {(row.module, row.way, row.operator): (row.calls, row.bytes) for row in rows}


def test_a_copy_is_found_in_its_module():
    copies = find(lambda x: x.mT.contiguous() * 2)
    assert copies["blocks.*", "forward", "clone"] == (1, SIZE)


def test_a_copy_of_the_gradient_is_found_where_the_forward_was():
    copies = find(lambda x: x.mT.mT.mT * torch.ones(6, 6))
    assert {key: row for key, row in copies.items() if key[1] == "backward"} == {
        ("blocks.*", "backward", "clone"): (1, SIZE)
    }


def test_closing_the_gaps_of_a_slice_counts():
    copies = find(lambda x: nn.functional.pad(x[..., :4].contiguous(), (0, 2)))
    assert copies == {("blocks.*", "forward", "clone"): (1, SIZE * 4 // 6)}


@pytest.mark.parametrize("function", [nn.functional.relu, lambda x: x.double().float()])
def test_an_unchanged_order_does_not_count(function):
    assert find(function) == {}


@pytest.mark.parametrize("attention", ["longformer", "full"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_no_block_changes_a_layout_in_nhwc(attention, dtype):
    keys = dict(img_size=64, num_classes=3, attention_args={"longformer": {"backend": "blocked"}})
    model = vil.get_model("vil_tiny", attention=attention, **keys)
    images = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    rows = conversions(model.to(memory_format=torch.channels_last), images, dtype)
    assert [row for row in rows if ".blocks." in row.module] == []


def test_a_block_that_is_computed_again_is_itself():
    model = vil.get_model("vil_tiny", img_size=64, num_classes=3, grad_checkpoint=True)
    seen = []
    with ModuleScopes(model) as scopes:
        model.stages[0].blocks[0].attn.proj_drop.register_forward_pre_hook(
            lambda *_: seen.append(scopes.current)
        )
        model(torch.randn(1, 3, 64, 64)).sum().backward()
    assert seen == [("stages.0.blocks.*.attn.proj_drop", "forward")] * 2
