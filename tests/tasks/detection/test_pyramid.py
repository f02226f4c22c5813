"""Backbones of detectors: the reference's features, and padding that nothing sees."""

import json
import zlib
from pathlib import Path

import pytest
import torch

from tests.common.detection.detectors import pictures, small_body
from vil.layers.attention import set_progress
from vil.layers.attention.longformer import LongformerAttention
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.pretrained.load_weights import get_2021_names
from vil.tasks.detection.models.detectors import crop_levels
from vil.tasks.detection.models.fpn import Backbone, strip_head
from vil.utils.train_step import TrainStep

NUMBERS = json.loads(
    (Path(__file__).parents[2] / "golden" / "detection_features.json").read_text("utf-8")
)
ARCH = (
    "l1,h2,d32,n1,s1,g1,p4,f3,a{a}_l2,h2,d32,n1,s1,g1,p2,f3,a{a}_"
    "l3,h4,d64,n1,s1,g1,p2,f3,a{a}_l4,h4,d64,n1,s1,g0,p2,f3,a{a}"
)


def filled(name: str, shape: torch.Size) -> torch.Tensor:
    """The values that the reference gave the parameter of this name."""
    factor = 1 + zlib.crc32(name.encode()) % 97 / 97
    s = torch.sin(torch.arange(1, shape.numel() + 1, dtype=torch.float64) * factor).view(shape)
    if name.endswith(("norm.weight", "norm_embed.weight")):
        return 1 + 0.1 * s
    return s if "relative_position" in name else 0.1 * s


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: f"a{row['absolute']}")
def test_maps_are_those_of_the_reference(row):
    """Its position table fits the largest image, 120 px rounded up to 128, and is cropped."""
    stages = parse_arch(ARCH.format(a=row["absolute"]), "longformer")
    model = MsViT(stages, img_size=128, num_classes=5, pos_resize="crop").eval()
    state = model.state_dict()
    for name, original in get_2021_names(model).items():
        state[name].copy_(filled(original, state[name].shape))
    i = torch.arange(3 * 64 * 96, dtype=torch.float64)
    images = (torch.sin(0.013 * i) + torch.cos(0.0007 * i)).float().view(1, 3, 64, 96)
    with torch.no_grad():
        maps = model.forward_intermediates(images, intermediates_only=True)
    for found, (shape, total, absolute, first) in zip(maps, row["levels"], strict=True):
        assert list(found.shape[1:]) == shape
        assert found.sum().item() == pytest.approx(total, abs=1e-4 * absolute)
        assert found.abs().sum().item() == pytest.approx(absolute, rel=1e-4)
        assert found.flatten()[:3].tolist() == pytest.approx(first, abs=1e-4)


def padded(images: list[torch.Tensor], divisor: int) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = torch.tensor([image.shape[-2:] for image in images])
    rows, cols = (-(-int(most) // divisor) * divisor for most in sizes.amax(0))
    batch = torch.zeros(len(images), 3, rows, cols)
    for place, image in zip(batch, images):
        place[:, : image.shape[1], : image.shape[2]] = image
    return batch, sizes


def noisy(backbone: Backbone) -> Backbone:
    """Vectors are drawn too: a bias in the padding would be seen."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return backbone.eval()


POOLED, DENSE = ("pool",), ("p6", "p7")


def backbone_of(extra: tuple[str, ...], norm: bool = False, absolute: int = 0, **own) -> Backbone:
    torch.manual_seed(0)
    stages = (1, 2, 3) if extra == POOLED else (2, 3)
    body = strip_head(small_body(absolute, **own))
    return noisy(Backbone(body, stages=stages, channels=24, extra=extra, norm=norm))


@pytest.mark.long
@pytest.mark.defect("B33")
@pytest.mark.parametrize(
    ("extra", "norm", "absolute", "exact"),  # every pair of values
    [
        (POOLED, False, 0, 0),
        (POOLED, True, 1, 1),
        (POOLED, True, 0, 1),
        (DENSE, False, 1, 1),
        (DENSE, True, 0, 0),
        (DENSE, True, 1, 0),
    ],
    ids=str,
)
def test_an_image_does_not_depend_on_the_sizes_of_the_others(extra, norm, absolute, exact):
    own = {"attention_args": {"longformer": {"sw_exact": exact}}}
    backbone = backbone_of(extra, norm, absolute, **own)
    images = pictures((64, 96), (131, 70), (33, 41), (96, 160))
    with torch.no_grad():
        batch, sizes = padded(images, 16)
        body = backbone.body.forward_intermediates(batch, intermediates_only=True, valid=sizes)
        together = crop_levels(backbone(batch, sizes), sizes, backbone.strides)
        for image, found, place in zip(images, together, range(len(images))):
            alone, size = padded([image], 16)
            (expected,) = crop_levels(backbone(alone, size), size, backbone.strides)
            for name, level in expected.items():
                assert level.shape == found[name].shape
                assert torch.allclose(found[name], level, atol=1e-4), name
            for ours, theirs in zip(
                body,
                backbone.body.forward_intermediates(alone, intermediates_only=True, valid=size),
            ):
                rows, cols = (min(n) for n in zip(ours.shape[-2:], theirs.shape[-2:]))
                assert torch.allclose(
                    ours[place, :, :rows, :cols], theirs[0, :, :rows, :cols], atol=1e-4
                )


def test_what_is_in_the_padding_does_not_matter():
    backbone = backbone_of(DENSE)
    batch, sizes = padded(pictures((64, 96), (33, 41)), 16)
    spoiled = batch.clone()
    spoiled[1, :, 48:] = 1e3  # whole tokens of padding
    with torch.no_grad():
        levels = crop_levels(backbone(batch, sizes), sizes, backbone.strides)
        others = crop_levels(backbone(spoiled, sizes), sizes, backbone.strides)
    for mine, theirs in zip(levels, others):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("extra", "strides"),
    [(POOLED, [4, 8, 16, 32]), (DENSE, [8, 16, 32, 64]), (("p6",), [8, 16, 32]), ((), [8, 16])],
    ids=str,
)
def test_levels_have_the_strides_they_say(extra, strides):
    backbone = backbone_of(extra)
    assert backbone.strides == strides
    levels = backbone(torch.rand(1, 3, 80, 144))
    assert [tuple(level.shape[-2:]) for level in levels.values()] == [
        (-(-80 // stride), -(-144 // stride)) for stride in strides
    ]


def test_random_shift_and_its_end():
    """Training sees another window at each step until the switch, evaluation all nine chunks."""
    own = {"attention_args": {"longformer": {"mode": 1, "mode_switch": 0.5}}}
    backbone = backbone_of(POOLED, **own)
    plain = backbone_of(POOLED)
    batch, sizes = padded(pictures((96, 96)), 16)
    with torch.no_grad():
        expected = plain(batch, sizes)["0"]
        assert torch.equal(backbone(batch, sizes)["0"], expected)
        backbone.train()
        seen = []
        for step in (0, 1, 6):
            set_progress(backbone, TrainStep(0, step, step, 10, 1))
            seen.append(backbone(batch, sizes)["0"])
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)
    assert torch.equal(seen[2], expected)
    assert any(isinstance(m, LongformerAttention) and m.mode == 1 for m in backbone.modules())
