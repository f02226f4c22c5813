"""Attention modules: results of the 2021 reference, padding, odd sizes, MACs, registry."""

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vil
from tests.common.golden import GOLDEN, read, step_with_mode
from vil.layers.attention import (
    ATTENTIONS,
    Attention,
    build_attention,
    register_attention,
)
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.ops import BACKENDS, Case, Window
from vil.pretrained.load_weights import load_weights

pytestmark = pytest.mark.smoke

CASES = sorted(path.stem for path in GOLDEN.glob("*.safetensors") if "model_" not in path.stem)
OWN = {  # the required arguments of each attention
    "longformer": {"window": 3},
    "pattern": {"pattern": "axial | local:1", "chunk": 3},
    "linformer": {"num_features": 5},
    "performer": {"num_features": 6},
    "srformer": {"ratio": 3},
}
SEPARATE = {  # the arguments with the most parameters
    "longformer": {"share_weights": False},
    "pattern": {"share_weights": False},
    "global": {"share_weights": False},
    "linformer": {"share_kv": False},
}
BIASES = [
    (name, rel_pos)
    for name in ATTENTIONS
    for rel_pos in ([False, True] if ATTENTIONS.load(name).has_relative_bias else [False])
]


def build(meta: dict, backend: str) -> torch.nn.Module:
    common = dict(
        dim=meta["dim"],
        num_heads=meta["heads"],
        num_global=meta["n_global"],
        rel_pos=meta.get("rpe", False),
        grid=(meta["nx"], meta["ny"]),
    )
    own = {
        "full": dict,
        "linformer": lambda: dict(num_features=meta["num_feats"], share_kv=meta["share_kv"]),
        "performer": lambda: dict(num_features=meta["nb_features"], batch_max=True),
        "srformer": lambda: dict(ratio=meta["rratio"], ragged="drop"),
    }
    if meta["kind"] in own:
        return vil.build_attention(meta["kind"], **common, **own[meta["kind"]]())
    if meta["only_global"]:
        return vil.build_attention("global", **common, share_weights=meta["share_w"])
    return vil.build_attention(
        "longformer",
        **common,
        window=meta["window"],
        sw_exact=meta["sw_exact"],
        mode=meta["mode"],
        share_weights=meta["share_w"],
        backend=backend,
    )


def accepted(name: str) -> list[tuple[str, torch.dtype]]:
    """A backend in float64, which the golden cases that have it take in turns, and those that have
    float32 only; "auto" if the module has no backend."""
    meta = read(name)[0]
    if meta["kind"] != "local_attention" or meta["only_global"]:
        return [("auto", torch.float64)]
    grid = (meta["nx"], meta["ny"])
    window = Window.from_mode(grid, meta["window"], meta["sw_exact"], meta["mode"])
    sizes = 2, meta["heads"], meta["dim"] // meta["heads"], meta["n_global"]
    found = {
        backend: dtype
        for dtype in (torch.float32, torch.float64)
        for backend, entry in BACKENDS.items()
        if not entry.unsupported(Case(window, *sizes, dtype))
    }
    exact = [choice for choice in found.items() if choice[1] == torch.float64]
    others = [choice for choice in found.items() if choice not in exact]
    return [exact[CASES.index(name) % len(exact)], *others]


@pytest.mark.parametrize(
    ("name", "backend", "dtype"), [(name, *choice) for name in CASES for choice in accepted(name)]
)
def test_outputs_and_gradients_of_the_reference(name, backend, dtype):
    meta, tensors, params, grads = read(name)
    module = build(meta, backend).double().train(meta.get("training", False))
    load_weights(module, params)
    module.to(dtype)
    if meta.get("mode", 0) > 0:
        step_with_mode(module, meta["mode"])
    x = tensors["x"].to(dtype).requires_grad_()
    y = module(x, (meta["nx"], meta["ny"]))
    y.backward(tensors["grad_y"].to(dtype))
    found = {"y": y, "x": x.grad, **{key: value.grad for key, value in module.named_parameters()}}
    wanted = {"y": tensors["y"], "x": tensors["grad_x"], **grads}
    assert found.keys() == wanted.keys()
    bound = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    for key, value in wanted.items():
        assert (found[key].double() - value).norm() <= bound * value.norm(), key


@pytest.mark.parametrize(("name", "rel_pos"), BIASES)
def test_padding_changes_nothing_for_real_tokens(name, rel_pos):
    """An image gives the same result padded as alone: padding is never a key, and tables made for a
    third grid are resized to the size without padding.
    """
    torch.manual_seed(0)
    module = vil.build_attention(
        name, dim=8, num_heads=2, num_global=2, grid=(4, 6), rel_pos=rel_pos, **OWN.get(name, {})
    ).double()
    valid = torch.tensor([[5, 4]])
    x = torch.randn(1, 2 + 20, 8, dtype=torch.float64)
    padded = torch.randn(1, 7, 6, 8, dtype=torch.float64)
    padded[:, :5, :4] = x[:, 2:].unflatten(1, (5, 4))
    other = torch.full_like(padded, 900.0)
    other[:, :5, :4] = padded[:, :5, :4]
    rows = [
        real_rows(module(torch.cat([x[:, :2], image.flatten(1, 2)], 1), (7, 6), valid_hw=valid))
        for image in (padded, other)
    ]
    assert torch.allclose(*rows)
    assert torch.allclose(rows[0], module(x, (5, 4)))


def real_rows(out: torch.Tensor) -> torch.Tensor:
    """The two global tokens, and the first 5 x 4 tokens of a grid of 7 x 6."""
    return torch.cat([out[:, :2], out[:, 2:].unflatten(1, (7, 6))[:, :5, :4].flatten(1, 2)], dim=1)


@pytest.mark.defect("B17")
@pytest.mark.parametrize(("name", "rel_pos"), BIASES)
def test_every_parameter_gets_a_gradient(name, rel_pos):
    own = OWN.get(name, {}) | SEPARATE.get(name, {})
    module = vil.build_attention(name, dim=8, num_heads=2, grid=(3, 4), rel_pos=rel_pos, **own)
    module(torch.randn(2, 13, 8), (3, 4)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (7, 5)])
@pytest.mark.parametrize("num_global", [0, 1, 3])
def test_odd_grids(name, grid, num_global):
    """Built for another grid, one image, with and without global tokens: finite gradients."""
    if name == "global" and not num_global:
        return  # raises, see below
    own = dict(num_global=num_global, grid=(4, 4), **OWN.get(name, {}))
    module = vil.build_attention(name, dim=8, num_heads=2, **own)
    x = torch.randn(1, num_global + grid[0] * grid[1], 8, requires_grad=True)
    out = module(x, grid)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_bfloat16_is_close_to_float32(name):
    torch.manual_seed(0)
    module = vil.build_attention(name, dim=8, num_heads=2, grid=(7, 5), **OWN.get(name, {}))
    x = torch.randn(2, 36, 8)
    wanted = module(x, (7, 5))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = module(x, (7, 5))
    pure = module.bfloat16()(x.bfloat16(), (7, 5))
    for found in (mixed, pure):
        assert found.dtype == torch.bfloat16
        assert (found.float() - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.defect("B15")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("longfrmer", {}, "unknown attention 'longfrmer'; did you mean 'longformer'"),
        (
            "longformer",
            {"window": 2, "windw": 3},
            "unknown argument of longformer attention 'windw'; did you mean 'window'",
        ),
        ("longformer", {"window": 2, "num_heads": 3}, "num_heads 3 does not divide dim 8"),
        ("longformer", {}, "longformer attention needs the argument window"),
        ("pattern", {"pattern": "axail"}, "unknown pattern 'axail'; did you mean 'axial'"),
        ("pattern", {"pattern": "axial", "rel_pos": True}, "needs `grid`"),
        ("pattern", {"pattern": "axial", "max_reach": -1}, "`max_reach` at least 0, got 8 and -1"),
        ("full", {"rel_pos": True}, "needs `grid`"),
        ("linformer", {"num_features": 5}, "needs `grid`"),
        ("srformer", OWN["srformer"] | {"rel_pos": True}, "srformer .* use an absolute position"),
        ("srformer", {"ratio": 0}, "ratio of spatial reduction must be at least 1, got 0"),
        ("srformer", {"ratio": 2, "ragged": "pda"}, "did you mean 'pad'"),
        ("global", {"num_global": 0}, "at least one global token"),
    ],
)
def test_invalid_settings_raise(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        vil.build_attention(name, **({"dim": 8, "num_heads": 2} | arguments))


@pytest.mark.defect("B13")
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("separate", [False, True])
def test_macs_are_half_the_counted_flops_on_complete_chunks(name, separate):
    own = OWN.get(name, {}) | (SEPARATE.get(name, {}) if separate else {})
    own |= {"backend": "chunk_autograd"} if name == "longformer" else {}
    own |= {"pattern": "swin:3"} if name == "pattern" else {}  # of complete chunks
    module = vil.build_attention(name, dim=8, num_heads=2, num_global=2, grid=(6, 9), **own)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(torch.randn(1, 56, 8), (6, 9))
    assert counter.get_total_flops() == 2 * module.macs((6, 9))


class Averaging(Attention):
    """A user's attention: every token gets a weighted mean of all tokens."""

    has_relative_bias = False

    def __init__(self, dim, num_heads, *, strength, qkv_bias=True, **common):
        super().__init__(dim, num_heads, **common)
        self.proj, self.strength = torch.nn.Linear(dim, dim, bias=qkv_bias), strength

    def forward(self, x, grid, valid_hw=None):
        return self.proj_drop(self.proj(x.mean(1, keepdim=True) * self.strength).expand_as(x))

    def macs(self, grid: tuple[int, int]) -> int:
        return self.dim**2


@pytest.fixture
def averaging():
    register_attention("averaging", Averaging, feature="strength", about="a mean")
    yield "averaging"
    ATTENTIONS.remove("averaging")


def test_a_registered_attention_is_built_by_name_and_by_a_model(averaging):
    assert isinstance(build_attention(averaging, dim=8, num_heads=2, strength=3), Averaging)
    arch = "l1,h1,d8,n1,s1,g1,p4,f5,a0_l2,h1,d8,n1,s1,g1,p2,f2,a0"
    model = MsViT(parse_arch(arch, averaging), img_size=16, num_classes=3)
    assert [stage.blocks[0].attn.strength for stage in model.stages] == [5, 2]
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(p.grad is not None for p in model.stages.parameters())
    model.set_input_size(24)
    assert len(model.macs((24, 24))) == 3
    with pytest.raises(ValueError, match="unknown argument of averaging attention 'strengh'"):
        build_attention(averaging, dim=8, num_heads=2, strengh=3)


class WithoutGrid(Averaging):
    def __init__(self, dim: int, num_heads: int, *, strength: int, num_global: int = 1) -> None:
        super().__init__(dim, num_heads, strength=strength, num_global=num_global)


class WithBias(Averaging):
    has_relative_bias = True


class WithoutMacs(Averaging):
    macs = Attention.macs


@pytest.mark.parametrize(
    ("cls", "declared", "message"),
    [
        (torch.nn.Linear, {}, "must be a subclass of vil.layers.attention.Attention"),
        (WithoutGrid, {}, r"\(WithoutGrid\) lacks .* grid, qkv_bias, attn_drop, proj_drop"),
        (WithBias, {}, r"lacks the arguments rel_pos \(set has_relative_bias = False\)"),
        (WithoutMacs, {}, "must define the method macs"),
        (Averaging, {"keys": {"strenght": "A.B"}}, "'strenght'; did you mean 'strength'"),
        (Averaging, {"feature": "window"}, "unknown argument of mine attention 'window'"),
    ],
)
def test_a_class_that_breaks_the_contract_is_not_registered(cls, declared, message):
    with pytest.raises(ValueError, match=message):
        register_attention("mine", cls, **declared)
    assert "mine" not in ATTENTIONS


def test_a_registered_home_is_checked_when_it_is_built():
    register_attention("mine", "torch.nn:Linear")
    try:
        with pytest.raises(ValueError, match="must be a subclass"):
            build_attention("mine", dim=8, num_heads=2)
    finally:
        ATTENTIONS.remove("mine")


def test_attentions_are_listed_without_torch():
    code = (
        "import sys; from vil.layers.attention import ATTENTIONS;"
        "assert ATTENTIONS['longformer'].key_names['mode'] == 'MODEL.VIT.MSVIT.MODE';"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
