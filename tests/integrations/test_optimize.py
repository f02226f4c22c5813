"""`vil.optimize_for_inference`: the same outputs, less work, and no training."""

import copy
import pickle
from functools import partial

import pytest
import timm
import torch
from timm.layers import Mlp
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import vil
from tests.common.native_cache import needs_compiler
from vil.layers.packed_linear import PackedLinear, is_packed
from vil.ops.native import library

ARCH = "l1,h1,d16,n1,s1,g1,p4,f3,a0_l2,h2,d32,n1,s1,g1,p2,f3,a0"
SMALL = {
    "vil": lambda: vil.build_model(
        None,
        {"MODEL.VIT.MSVIT.ARCH": ARCH, "INPUT.IMAGE_SIZE": 32, "DATA.NUM_CLASSES": 5}
    ),
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5),
    "swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(1, 1), num_heads=(2, 4),
        embed_dim=16, num_classes=5,
    ),
    "convnext": lambda: timm.create_model("convnext_atto", num_classes=5),
    "beit": lambda: timm.create_model("beit_base_patch16_224", img_size=32, depth=1, num_classes=5),
    "eva": lambda: timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=1, num_classes=5),
}  # fmt: skip
DTYPES = [torch.float32, *([torch.bfloat16] if library.has_bfloat16() else [])]
IMAGES = {"eva": (2, 3, 28, 28)}


@pytest.fixture(params=SMALL)
def model_and_images(request):
    torch.manual_seed(0)
    model = SMALL[request.param]().eval()
    for parameter in model.parameters():  # otherwise biases are 0
        nn.init.normal_(parameter, std=0.1)
    return model, torch.randn(IMAGES.get(request.param, (2, 3, 32, 32)))


@torch.no_grad()
def test_the_outputs_are_those_of_the_model(model_and_images):
    model, images = model_and_images
    expected = model(images)
    found = vil.optimize_for_inference(model)(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@torch.no_grad()
def test_in_bfloat16_the_error_is_that_of_the_converted_model(model_and_images):
    model, images = model_and_images
    expected = model(images)
    plain = copy.deepcopy(model).bfloat16()(images.bfloat16()).float()
    found = vil.optimize_for_inference(model, dtype=torch.bfloat16)(images)
    assert found.dtype == torch.float32
    unit = 2**-8 * expected.abs().max()
    assert (found - expected).abs().max() <= 2 * (plain - expected).abs().max() + 4 * unit


def test_the_model_is_not_changed():
    model = SMALL["vil"]().train()
    before = copy.deepcopy(model.state_dict())
    vil.optimize_for_inference(model, dtype=torch.bfloat16)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_activations_are_fused_and_dropout_is_removed():
    model = vil.optimize_for_inference(SMALL["vit"]()).model
    mlp = model.blocks[0].mlp
    assert (mlp.fc1.activation, type(mlp.act), mlp.fc2.activation) == ("gelu", nn.Identity, "")
    assert not any(isinstance(module, nn.Dropout | nn.Linear) for module in model.modules())
    tanh = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, act_layer="gelu_tanh")
    mlp = vil.optimize_for_inference(tanh).model.blocks[0].mlp
    assert mlp.fc1.activation == ""
    assert type(mlp.act) is not nn.Identity


class SquaredReLU(nn.ReLU):
    def forward(self, x):
        return super().forward(x) ** 2


def hooked(name):
    model = nn.Sequential(Mlp(8, 8))
    module = model[0].get_submodule(name)
    module.register_forward_hook(lambda module, args, out: out / 2)
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


def replaced():
    model = nn.Sequential(Mlp(8, 8))
    model[0].fc1.forward = lambda x: nn.functional.linear(2 * x, model[0].fc1.weight)
    return model


KEPT = {
    "a subclass of an activation": lambda: nn.Sequential(Mlp(8, 8, act_layer=SquaredReLU)),
    "a replaced forward": replaced,
    "weights of a hook": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))),
    **{f"a hook of {name or 'all'}": partial(hooked, name) for name in ("", "fc1", "act", "fc2")},
}


@pytest.mark.parametrize("what", KEPT)
def test_what_modules_compute_by_themselves_is_kept(what):
    model, x = KEPT[what]().eval(), torch.randn(3, 8)
    torch.testing.assert_close(vil.optimize_for_inference(model)(x), model(x))


def test_copies_and_pickles_have_the_same_outputs():
    fast, images = vil.optimize_for_inference(SMALL["vil"]()), torch.randn(1, 3, 32, 32)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(other(images), fast(images))


def test_gradients_and_training_are_refused():
    fast = vil.optimize_for_inference(SMALL["vil"]())
    assert not fast(torch.randn(1, 3, 32, 32)).requires_grad
    assert not fast.eval().training
    with pytest.raises(RuntimeError, match="cannot be trained"):
        fast.train()
    with pytest.raises(ValueError, match=r"must be a floating-point type, not torch\.int8"):
        vil.optimize_for_inference(SMALL["vil"](), dtype=torch.int8)


def test_convolutions_are_channels_last():
    model, x = timm.create_model("resnet18").eval(), torch.randn(2, 3, 64, 64)
    fast = vil.optimize_for_inference(model)
    for conv in (fast.model.conv1, fast.model.layer4[1].conv2):
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.conv1.weight.is_contiguous()
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=1e-5)


def test_moving_converting_and_loading_are_refused():
    fast = vil.optimize_for_inference(SMALL["vil"]())
    fast.to("cpu").float().to(memory_format=torch.channels_last)
    for change in (lambda: fast.to("meta"), fast.half):
        with pytest.raises(RuntimeError, match="original model, then optimize it again"):
            change()
    with pytest.raises(RuntimeError, match="load them into the original model, then optimize it"):
        fast.load_state_dict(fast.state_dict())


def test_structures_of_tensors_are_converted():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *, index):
            return {"out": self.linear(x["in"]), "index": index}

    fast = vil.optimize_for_inference(Two(), dtype=torch.bfloat16)
    found = fast({"in": torch.randn(2, 4)}, index=torch.tensor([1]))
    assert (found["out"].dtype, found["index"].dtype) == (torch.float32, torch.int64)


def test_float16_and_float64_use_ordinary_layers():
    fast = vil.optimize_for_inference(SMALL["vit"](), dtype=torch.float64)
    assert any(isinstance(module, nn.Linear) for module in fast.modules())
    assert not any(isinstance(module, PackedLinear) for module in fast.modules())
    assert fast(torch.randn(1, 3, 32, 32)).dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["vil", "vit"])
def test_with_torch_compile(name, dtype):
    model, images = SMALL[name]().eval(), torch.randn(2, 3, 32, 32)
    plain, compiled = (
        vil.optimize_for_inference(model, dtype=dtype, compile=compile)(images)
        for compile in (False, True)
    )
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert (compiled - plain).norm() <= bound * plain.norm()


def test_inside_torch_compile_it_runs_uncompiled():
    model, images = SMALL["vil"]().eval(), torch.randn(2, 3, 32, 32)
    fast = vil.optimize_for_inference(model)
    torch.testing.assert_close(torch.compile(fast)(images), fast(images))
    features = torch.compile(lambda x: fast.call(fast.model.forward_features, x))(images)
    torch.testing.assert_close(features, fast.call(fast.model.forward_features, images))


# --- blocks of vil's models


def packed_layers(model):
    return [module for module in model.modules() if is_packed(module)]


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_packed_for_compiled_code(dtype, monkeypatch):
    model, images = SMALL["vil"]().eval(), torch.randn(2, 3, 32, 32)
    fast = vil.optimize_for_inference(model, dtype=dtype)
    expected = model.to(dtype)(images.to(dtype)).float()
    near = dict(rtol=0, atol=(1e-5 if dtype == torch.float32 else 2e-2) * expected.abs().max())
    assert len(packed_layers(fast)) == 2 * 4, "in both blocks: one of attention, its output, MLP"
    with FlopCounterMode(display=False) as counter:
        found = fast(images)
    torch.testing.assert_close(found, expected, **near)
    flops = counter.get_flop_counts()["Global"]
    tokens = ((2 * 65, 16), (2 * 17, 32))
    assert flops[torch.ops.vil.linear] == sum(2 * n * dim * 4 * dim for n, dim in tokens)
    assert flops[torch.ops.vil.norm_mlp] == sum(4 * n * dim * 4 * dim for n, dim in tokens)
    for one in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(one(images), found)
    monkeypatch.setattr(library, "_off", ["off for this test"])
    elsewhere = pickle.loads(pickle.dumps(fast))
    assert not packed_layers(elsewhere)
    torch.testing.assert_close(elsewhere(images), expected, **near)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("name", ["norm1", "attn", "attn.proj", "norm2", "mlp", "mlp.fc2"])
def test_hooks_of_packed_blocks_are_called(name):
    model, images = SMALL["vil"]().eval(), torch.randn(2, 3, 32, 32)
    fast, seen = vil.optimize_for_inference(model), []
    module = fast.model.stages[0].blocks[0].get_submodule(name)
    module.register_forward_hook(lambda *args: seen.append(args))
    torch.testing.assert_close(fast(images), model(images))
    assert len(seen) == 1


@needs_compiler
def test_packed_weights_of_another_dtype_are_refused():
    fast = vil.optimize_for_inference(SMALL["vil"]())
    refused = pytest.raises(
        RuntimeError, match=r"packed for torch\.float32, not for torch\.bfloat16"
    )
    with torch.autocast("cpu", torch.bfloat16), refused:
        fast.model(torch.randn(1, 3, 32, 32))
