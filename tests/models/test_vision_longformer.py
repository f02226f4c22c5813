"""MsViT: image sizes, padding, gradient checkpointing, layer depths, frozen stages."""

import re

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vil
from vil.layers.attention import ATTENTIONS, set_progress
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.utils.train_step import TrainStep

pytestmark = pytest.mark.smoke

SMALL = "l1,h1,d8,n1,s1,g1,p4,f3,a0_l2,h2,d16,n2,s1,g2,p2,f2,a1_l3,h2,d16,n1,s0,g0,p2,f2,a0"


def small(**kwargs) -> MsViT:
    torch.manual_seed(0)
    return MsViT(parse_arch(SMALL), **({"img_size": 40, "num_classes": 5} | kwargs))


@pytest.mark.defect("B2")
@pytest.mark.parametrize("size", [(40, 40), (65, 70), (16, 120), (41, 16)])
def test_any_image_size(size):
    model = small().eval()
    x = torch.randn(2, 3, *size)
    assert model(x).shape == (2, 5)
    grids = [(size[0] // p, size[1] // p) for p in (4, 8, 16)]
    assert [tuple(m.shape) for m in model.forward_intermediates(x, intermediates_only=True)] == [
        (2, d, *g) for d, g in zip((8, 16, 16), grids)
    ]


def test_an_image_smaller_than_its_patches_raises():
    with pytest.raises(ValueError, match="smaller than its patches"):
        small()(torch.randn(1, 3, 12, 40))
    with pytest.raises(ValueError, match="stage 3 has no tokens"):
        small(img_size=12)


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name != "linformer"])
def test_padding_of_a_batch_is_never_attended_to(attention):
    """Maps of a padded image with `valid` equal those of the image alone.

    Not for linformer, whose projections are resized to the larger grid.
    """
    position = "a0" if attention == "longformer" else "a1"  # independent of the grid
    arch = re.sub("a[01]", position, SMALL.replace("s0", "s1").replace("g0", "g1"))
    stages = parse_arch(arch, attention)
    model = MsViT(stages, img_size=64, pos_resize="crop").double().eval()
    x = torch.randn(1, 3, 48, 32, dtype=torch.float64)
    padded = nn.functional.pad(x, (0, 32, 0, 16))
    batch = torch.cat([padded, torch.randn(1, 3, 64, 64, dtype=torch.float64)])
    maps = model.forward_intermediates(
        batch, intermediates_only=True, valid=torch.tensor([[48, 32], [64, 64]])
    )
    for found, wanted in zip(maps, model.forward_intermediates(x, intermediates_only=True)):
        assert torch.allclose(found[:1, :, : wanted.shape[2], : wanted.shape[3]], wanted)


@pytest.mark.parametrize("size", [(48, 32), (47, 33), (33, 58)], ids=str)
def test_an_image_of_any_size_has_the_same_maps_in_any_batch(size):
    arch = SMALL.replace("s0", "s1").replace("g0", "g1")
    model = MsViT(parse_arch(arch), img_size=80, pos_resize="crop").double().eval()
    image, valid = torch.randn(1, 3, *size, dtype=torch.float64), torch.tensor([size])
    padded = torch.randn(1, 3, 70, 65, dtype=torch.float64)  # with any values in the padding
    padded[..., : size[0], : size[1]] = image
    found, wanted = (
        model.forward_intermediates(x, intermediates_only=True, valid=valid)
        for x in (padded, image)
    )
    for one, other in zip(found, wanted):
        rows, cols = other.shape[-2:]
        torch.testing.assert_close(one[..., :rows, :cols], other)
        assert not one[..., rows:, :].any()
        assert not one[..., cols:].any()


def test_gradient_checkpointing_keeps_gradients_with_random_shift():
    x, grads = torch.randn(2, 3, 40, 40, dtype=torch.float64), []
    own = dict(drop_path_rate=0.3, drop_rate=0.1, attention_args={"longformer": {"mode": 1}})
    for at_first, later in ((False, False), (True, True), (False, True)):
        model = small(grad_checkpoint=at_first, **own).double().train()
        model.set_grad_checkpointing(later)
        set_progress(model, TrainStep(seed=3, step=17))
        torch.manual_seed(5)
        model(x).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, *checkpointed in zip(*grads):
        assert all((plain - grad).norm() <= 1e-9 * plain.norm() for grad in checkpointed)


@pytest.mark.defect("B13")
@pytest.mark.parametrize("attention", ["longformer", "full"])
def test_macs_are_half_the_counted_flops_on_full_chunks(attention):
    own = {"longformer": {"backend": "chunk_autograd"}}
    model = vil.get_model("vil_tiny", attention=attention, attention_args=own).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(1, 3, 224, 224))
    assert counter.get_total_flops() == 2 * sum(model.macs((224, 224)))


def test_pooling():
    tokens = torch.arange(12.0).view(1, 3, 4)
    first, mean = tokens[:, 0], tokens.mean(1)
    by_token = SMALL.replace("g0", "g1")
    assert torch.equal(MsViT(parse_arch(by_token), img_size=40).pool(tokens), first)
    assert torch.equal(MsViT(parse_arch(by_token), img_size=40, avg_pool=True).pool(tokens), mean)
    assert torch.equal(small().pool(tokens), mean)  # no global token in the last stage


ATTN_SIZES = {"longformer": 2, "linformer": 5, "performer": 6, "srformer": 3}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_trains_a_step(name):
    torch.manual_seed(0)
    stages = parse_arch(
        f"l1,h2,d8,n2,g1,p4,f{ATTN_SIZES.get(name, 1)},a1_l2,h2,d16,n1,g2,p2,f2,a1", name
    )
    model = MsViT(stages, img_size=40, num_classes=5, drop_rate=0.1, drop_path_rate=0.3).train()
    x, target = torch.randn(4, 3, 44, 36), torch.arange(4)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(3):
        set_progress(model, TrainStep(step=step))
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.defect("B18")
def test_attentions_without_relative_bias_get_absolute_positions_and_a_warning(caplog):
    arch = "l1,h1,d8,n1,g1,p4,f2,a0_l2,h2,d16,n2,g1,p2,f2,a0_l3,h2,d16,n2,s0,g0,p2,a0"
    stages = parse_arch(arch, "longformer/longformer,performer")
    model = MsViT(stages, img_size=40, num_classes=5)
    (record,) = caplog.records
    assert "stage 2 (performer) does not support a relative position bias" in record.getMessage()
    assert [stage.embed.position is not None for stage in model.stages] == [False, True, False]
    assert [spec.absolute for spec in model.specs] == [False, True, False]
    biased = {
        name.split(".")[1] for name, _ in model.named_parameters() if "relative_position" in name
    }
    assert biased == {"0", "2"}
    assert model(torch.randn(1, 3, 40, 40)).shape == (1, 5)


def test_layer_of_every_parameter():
    model = small()  # blocks 1, 2, 1
    assert model.num_layers == 5
    wanted = {
        "stages.0.embed.proj.weight": 0,
        "stages.0.blocks.0.norm1.weight": 1,
        "stages.1.embed.cls_token": 2,
        "stages.1.blocks.0.attn.kv.bias": 2,
        "stages.1.blocks.1.mlp.fc1.weight": 3,
        "stages.2.embed.proj.bias": 4,
        "stages.2.blocks.0.attn.qkv.bias": 4,
        "norm.weight": 5,
        "head.bias": 5,
    }
    assert {name: model.layer_of(name) for name in wanted} == wanted
    assert {model.layer_of(name) for name, _ in model.named_parameters()} == set(range(6))
    with pytest.raises(ValueError, match="'stages.3.embed.proj.bias' is not a parameter"):
        model.layer_of("stages.3.embed.proj.bias")

    without = MsViT(parse_arch("l1,d6,n0_l2,d6,n1_l3,d6,n0"), img_size=40)
    depths = [without.layer_of(f"stages.{i}.embed.proj.bias") for i in range(3)]
    assert [*depths, without.num_layers] == [0, 1, 1, 2]


def test_frozen_stages_get_no_gradient():
    model = small()
    model.freeze_stages(2)
    model(torch.randn(1, 3, 40, 40)).sum().backward()
    frozen = {name for name, p in model.named_parameters() if p.grad is None}
    assert frozen == {
        name for name, _ in model.named_parameters() if name.startswith(("stages.0", "stages.1"))
    }
    with pytest.raises(ValueError, match="cannot freeze 4 stages: the model has 3"):
        model.freeze_stages(4)
