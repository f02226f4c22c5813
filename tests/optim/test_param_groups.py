"""Weight decay applies to the same parameters as in the 2021 code, and to each one once."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from vil.optim import decay_groups

pytestmark = pytest.mark.smoke

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "weight_decay_groups.json").read_text())


def names(group):
    return [name for name, _ in group["params"]]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["attn_type"] + c["arch"][-2:])
def test_the_split_is_that_of_the_2021_code(case):
    parameters = [(name, nn.Parameter(torch.zeros(1))) for name in case["decay"] + case["no_decay"]]
    decay, no_decay = decay_groups(parameters, 0.05, 0.0, case["no_decay"])
    assert (names(decay), decay["weight_decay"]) == (case["decay"], 0.05)
    assert (names(no_decay), no_decay["weight_decay"]) == (case["no_decay"], 0.0)


def test_frozen_parameters_are_skipped_and_shared_ones_come_once():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    first.bias.requires_grad_(False)
    second.weight = first.weight
    parameters = [*first.named_parameters("a"), *second.named_parameters("b")]
    (group,) = decay_groups(parameters, 0.1, 0.0)
    assert names(group) == ["a.weight", "b.bias"]


def test_layers_near_the_input_have_smaller_learning_rates():
    named = [(name, nn.Parameter(torch.zeros(1))) for name in ("0.w", "0.b", "1.w", "1.b", "3.w")]
    groups = decay_groups(
        named,
        0.1,
        0.0,
        {"0.b", "1.b"},
        layers={name: int(name[0]) for name, _ in named},
        layer_decay=0.5,
    )
    assert [(names(g), g["weight_decay"], g["lr_scale"]) for g in groups] == [
        (["0.w"], 0.1, 0.125),
        (["1.w"], 0.1, 0.25),
        (["3.w"], 0.1, 1.0),
        (["0.b"], 0.0, 0.125),
        (["1.b"], 0.0, 0.25),
    ]
