"""Worked numbers of the 2021 reference: logits and gradients of models filled by a formula.

Every parameter is filled from the checksum of its name in the reference, so these models need no
weights. Cyclic attention is excluded: the reference attended to padding there.
"""

import json
import zlib
from pathlib import Path

import pytest
import torch

from tests.common.golden import step_with_mode
from vil.layers.attention.longformer import LongformerAttention
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.pretrained.load_weights import get_2021_names

pytestmark = pytest.mark.smoke

NUMBERS = json.loads(
    (Path(__file__).parent.parent / "golden" / "worked_numbers.json").read_text(encoding="utf-8")
)
ROWS = {row["name"]: row for row in NUMBERS["rows"]}
ARCH = (
    "l1,h2,d32,n1,s1,g{g},p4,f{f},a{a}_l2,h2,d32,n1,s1,g{g},p2,f{f},a{a}_"
    "l3,h4,d64,n1,s{s},g{g},p2,f{f},a{a}_l4,h4,d64,n1,s{s},g{last},p2,f{f},a{a}"
)


def build(row: dict, **own) -> MsViT:
    model = MsViT(
        parse_arch(ARCH.format(**row["arch"]), row["attention"]),
        img_size=80,
        num_classes=5,
        avg_pool=row["avg_pool"],
        attention_args={row["attention"]: row["own"] | own},
    )
    state = model.state_dict()
    for name, original in get_2021_names(model).items():
        state[name].copy_(filled(original, state[name].shape))
    return model


def filled(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the values of the parameter or buffer with this name in the reference."""
    factor = 1 + zlib.crc32(name.encode()) % 97 / 97
    s = torch.sin(torch.arange(1, shape.numel() + 1, dtype=torch.float64) * factor).view(shape)
    if name.endswith(("norm.weight", "norm_embed.weight")):
        return 1 + 0.1 * s
    wide = name.endswith("projection_matrix") or "relative_position" in name
    return s if wide else 0.1 * s


def images() -> torch.Tensor:
    i = torch.arange(2 * 3 * 80 * 80, dtype=torch.float64)
    return (torch.sin(0.013 * i) + torch.cos(0.0007 * i)).float().view(2, 3, 80, 80)


@pytest.mark.parametrize("name", ROWS)
def test_logits_and_gradient_norms(name):
    row = ROWS[name]
    model = build(row).eval()
    logits = model(images())
    assert torch.allclose(logits, torch.tensor(row["logits"]), rtol=0, atol=1e-4)
    (logits.flatten() * torch.linspace(-1, 1, 10)).sum().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    assert torch.cat(grads).norm().item() == pytest.approx(row["grad"], rel=1e-4)
    patch = model.stages[0].embed.proj.weight
    assert patch.grad.norm().item() == pytest.approx(row["patch_grad"], rel=1e-4)


@pytest.mark.parametrize("row", NUMBERS["random_shift"], ids=lambda row: f"mode {row['mode']}")
def test_logits_with_random_shift(row):
    """In training, every layer attends to the query's chunk and the same neighbor."""
    model = build(ROWS["LF0"], mode=1).train()
    for module in model.modules():
        if isinstance(module, LongformerAttention):
            step_with_mode(module, row["mode"])
    assert torch.allclose(model(images())[0], torch.tensor(row["logits"]), rtol=0, atol=1e-4)
