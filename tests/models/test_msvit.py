"""MsViT: the reference's numbers, any image size, checkpointing of activations, export, counts."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vil
from vil.layers.attention import set_progress
from vil.models.arch import format_arch, parse_arch
from vil.models.msvit import MsViT
from vil.models.zoo import ARCHS
from vil.utils.progress import Progress

SMALL = "l1,h1,d8,n1,s1,g1,p4,f3,a0_l2,h2,d16,n2,s1,g2,p2,f2,a1_l3,h2,d16,n1,s0,g0,p2,f2,a0"


def small(**kwargs) -> MsViT:
    torch.manual_seed(0)
    return MsViT(parse_arch(SMALL), **({"img_size": 40, "num_classes": 5} | kwargs))


@pytest.mark.parametrize("size", [(40, 40), (65, 70), (16, 120), (41, 16)])
def test_any_image_size(size):
    model = small().eval()
    x = torch.randn(2, 3, *size)
    assert model(x).shape == (2, 5)
    grids = [(size[0] // p, size[1] // p) for p in (4, 8, 16)]
    assert [tuple(m.shape) for m in model.forward_stages(x)] == [
        (2, d, *g) for d, g in zip((8, 16, 16), grids)
    ]


def test_an_image_smaller_than_its_patches_is_refused():
    with pytest.raises(ValueError, match="smaller than the patch"):
        small()(torch.randn(1, 3, 12, 40))
    with pytest.raises(ValueError, match="stage 3 has no token left"):
        small(img_size=12)


def test_padding_of_a_batch_is_never_attended_to():
    """Stage maps of an image inside a larger zero-padded one, with `valid`, equal those of the
    image alone.
    """
    model = (
        MsViT(parse_arch(SMALL.replace("a1", "a0").replace("s0", "s1")), img_size=64)
        .double()
        .eval()
    )
    x = torch.randn(1, 3, 48, 32, dtype=torch.float64)
    padded = nn.functional.pad(x, (0, 32, 0, 16))
    batch = torch.cat([padded, torch.randn(1, 3, 64, 64, dtype=torch.float64)])
    maps = model.forward_stages(batch, valid=torch.tensor([[48, 32], [64, 64]]))
    for found, wanted in zip(maps, model.forward_stages(x)):
        assert torch.allclose(found[:1, :, : wanted.shape[2], : wanted.shape[3]], wanted)


def test_gradient_checkpointing_changes_no_gradient_of_a_random_shift_model():
    x, grads = torch.randn(2, 3, 40, 40, dtype=torch.float64), []
    for grad_checkpoint in (False, True):
        model = (
            small(
                grad_checkpoint=grad_checkpoint,
                drop_path_rate=0.3,
                drop_rate=0.1,
                attention_args={"longformer": {"mode": 1}},
            )
            .double()
            .train()
        )
        set_progress(model, Progress(seed=3, step=17))
        torch.manual_seed(5)
        model(x).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*grads):
        assert (plain - checkpointed).norm() <= 1e-9 * plain.norm()


def test_every_parameter_gets_a_gradient():
    model = small(attention_args={"longformer": {"share_weights": False}})
    model(torch.randn(2, 3, 40, 40)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_export_with_symbolic_image_size():
    """One exported program runs at any size: whole chunks, padded ones, resized positions."""
    model = small(attention_args={"longformer": {"backend": "gathered"}}).eval()
    rows, cols = (torch.export.Dim(name, min=2, max=64) for name in ("rows", "cols"))
    exported = torch.export.export(
        model, (torch.randn(2, 3, 96, 160),), dynamic_shapes={"x": {2: 16 * rows, 3: 16 * cols}}
    ).module()
    for size in ((96, 160), (64, 64), (144, 48)):
        x = torch.randn(2, 3, *size)
        assert torch.allclose(exported(x), model(x), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "attention", "params", "published"),
    [
        ("vil_tiny", "longformer", 6_707_080, 1.43),
        ("vil_tiny_rpb", "longformer", 6_719_698, 1.43),
        ("vil_small", "longformer", 24_635_752, 5.12),
        ("vil_small_rpb", "longformer", 24_657_328, 5.12),
        ("vil_medium_deep", "longformer", 39_721_192, 9.1),
        ("vil_medium_deep_rpb", "longformer", 39_782_296, 9.1),
        ("vil_medium_wide", "longformer", 39_776_488, 11.3),
        ("vil_small", "full", 24_635_752, 6.95),
    ],
)
def test_published_counts(name, attention, params, published):
    """Parameters exactly, multiply-accumulates at 224 px within 0.5 % of the published."""
    with torch.device("meta"):
        model = vil.get_model(name, attention=attention)
    assert sum(p.numel() for p in model.parameters()) == params
    assert sum(model.macs((224, 224))) == pytest.approx(published * 1e9, rel=0.005)


@pytest.mark.parametrize("attention", ["longformer", "full"])
def test_macs_are_half_the_counted_flops_on_whole_chunks(attention):
    own = {"longformer": {"backend": "chunk_autograd"}}
    model = vil.get_model("vil_tiny", attention=attention, attention_args=own).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(1, 3, 224, 224))
    assert counter.get_total_flops() == 2 * sum(model.macs((224, 224)))


def test_shapes_on_the_meta_device():
    with torch.device("meta"):
        model = vil.get_model("vil_tiny_rpb")
        assert model(torch.empty(2, 3, 224, 200)).shape == (2, 1000)


def test_channels_last_images_give_the_same():
    model, x = small().eval(), torch.randn(2, 3, 40, 40)
    wanted = model(x)
    found = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_what_the_head_reads():
    tokens = torch.arange(12.0).view(1, 3, 4)
    first, mean = tokens[:, 0], tokens.mean(1)
    by_token = SMALL.replace("g0", "g1")
    assert torch.equal(MsViT(parse_arch(by_token), img_size=40).pool(tokens), first)
    assert torch.equal(MsViT(parse_arch(by_token), img_size=40, avg_pool=True).pool(tokens), mean)
    assert torch.equal(small().pool(tokens), mean)  # no global token in the last stage


def test_full_attention_in_one_stage_does_not_stick():
    stages = parse_arch("l1,s1_l2,s0_l3,s1", "longformer")
    assert [stage.attention for stage in stages] == [("longformer",), ("full",), ("longformer",)]


@pytest.mark.parametrize("name", ARCHS)
def test_architectures_survive_a_round_trip(name):
    assert format_arch(parse_arch(ARCHS[name])) == ARCHS[name]


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("l1,h3,d96,z4", r"stage 1 \('l1,h3,d96,z4'\): unknown letter 'z' \(letters: l number"),
        ("l1,h3,d97", "3 heads .letter h. do not divide the width 97"),
        ("l1_l3", "the letter l says 3, but it is stage 2"),
        ("l1,h3,h3", "'h' stands twice"),
        ("l1,d", "'d' is not a letter followed by a number"),
        ("", "'' is not a letter"),
        ("l1,p0", r"p \(patch side\) must be at least 1"),
        ("l1,d9.5", "'d9.5' is not"),
    ],
)
def test_malformed_architectures_are_refused(arch, message):
    with pytest.raises(ValueError, match=message):
        parse_arch(arch)


def test_models_by_name():
    assert "vil_tiny" in vil.list_models("vil_*")
    with pytest.raises(ValueError, match="did you mean 'vil_small'"):
        vil.get_model("vil_smal")
    model = vil.get_model("vil_tiny", num_classes=7, img_size=96)
    assert model(torch.randn(1, 3, 96, 96)).shape == (1, 7)
