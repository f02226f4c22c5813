"""What every attention module keeps: the reference, padding, odd sizes, export, counts."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vil
from tests.common.golden import GOLDEN, read, step_with_mode
from vil.layers.attention import ATTENTIONS
from vil.ops import BACKENDS, Case, Window
from vil.pretrained.load_weights import load_2021_weights

CASES = sorted(path.stem for path in GOLDEN.glob("*.safetensors") if "model_" not in path.stem)
OWN = {  # the least that each attention is built with
    "longformer": {"window": 3},
    "linformer": {"num_features": 5},
    "performer": {"num_features": 6},
    "srformer": {"ratio": 3},
}
SEPARATE = {  # the arguments that give each attention the most parameters
    "longformer": {"share_weights": False},
    "global": {"share_weights": False},
    "linformer": {"share_kv": False},
}
BIASES = [
    (name, rel_pos)
    for name, kind in ATTENTIONS.items()
    for rel_pos in ([False, True] if kind.has_relative_bias else [False])
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


def accepted(name: str) -> list[str]:
    """The backends that accept a golden case; one stands for all where the module has none."""
    meta = read(name)[0]
    if meta["kind"] != "local_attention" or meta["only_global"]:
        return ["auto"]
    grid = (meta["nx"], meta["ny"])
    window = Window.from_mode(grid, meta["window"], meta["sw_exact"], meta["mode"])
    case = Case(window, 2, meta["heads"], meta["dim"] // meta["heads"], meta["n_global"])
    return [name for name, backend in BACKENDS.items() if not backend.unsupported(case)]


@pytest.mark.parametrize(("name", "backend"), [(name, b) for name in CASES for b in accepted(name)])
def test_outputs_and_gradients_of_the_reference(name, backend):
    meta, tensors, params, grads = read(name)
    module = build(meta, backend).double().train(meta.get("training", False))
    load_2021_weights(module, params)
    if meta.get("mode", 0) > 0:
        step_with_mode(module, meta["mode"])
    x = tensors["x"].requires_grad_()
    y = module(x, (meta["nx"], meta["ny"]))
    y.backward(tensors["grad_y"])
    found = {"y": y, "x": x.grad, **{key: value.grad for key, value in module.named_parameters()}}
    wanted = {"y": tensors["y"], "x": tensors["grad_x"], **grads}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (found[key] - value).norm() <= 1e-9 * value.norm(), key


@pytest.mark.parametrize(("name", "rel_pos"), BIASES)
def test_padding_changes_nothing_for_real_tokens(name, rel_pos):
    """An image beside a larger one in a batch gives the same rows as alone: keys beyond `valid` are
    never seen, and tables made for a third grid are stretched to its own.
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
        real_rows(module(torch.cat([x[:, :2], image.flatten(1, 2)], 1), (7, 6), valid=valid))
        for image in (padded, other)
    ]
    assert torch.allclose(*rows)
    assert torch.allclose(rows[0], module(x, (5, 4)))


def real_rows(out: torch.Tensor) -> torch.Tensor:
    """Of two global tokens and a grid of 7 x 6, the global rows and those of the first 5 x 4."""
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
    """Built for another grid, one image, with and without global tokens: finite both ways."""
    if name == "global" and not num_global:
        return  # refused, see below
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


@pytest.mark.parametrize("name", ATTENTIONS)
def test_saved_state_gives_the_same_result(name):
    first, second = (
        vil.build_attention(name, dim=8, num_heads=2, grid=(7, 5), **OWN.get(name, {}))
        for _ in range(2)
    )
    x = torch.randn(2, 36, 8)
    assert not torch.equal(first(x, (7, 5)), second(x, (7, 5)))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x, (7, 5)), second(x, (7, 5)))


class OnMaps(torch.nn.Module):
    """An attention without global tokens, on (B, C, X, Y)."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x.flatten(2).mT, (x.shape[2], x.shape[3]))


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "global"])
def test_export_with_symbolic_sizes(name):
    own = OWN.get(name, {}) | ({"backend": "gathered"} if name == "longformer" else {})
    attention = vil.build_attention(name, dim=8, num_heads=2, num_global=0, grid=(4, 4), **own)
    module = OnMaps(attention).eval()
    rows, cols = (torch.export.Dim(axis, min=4, max=64) for axis in ("rows", "cols"))
    exported = torch.export.export(
        module, (torch.randn(2, 8, 7, 5),), dynamic_shapes={"x": {2: rows, 3: cols}}
    ).module()
    for size in ((7, 5), (4, 4), (6, 9), (12, 5)):
        x = torch.randn(2, 8, *size)
        assert torch.allclose(exported(x), module(x), atol=1e-5), size


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
        ("longformer", {"window": 0}, "must be positive"),
        ("longformer", {"window": 2, "sw_exact": 1, "mode": 1}, "needs all nine chunks"),
        ("longformer", {"window": 2, "num_heads": 3}, "3 heads do not divide the width 8"),
        ("full", {"rel_pos": True}, "needs the grid"),
        ("linformer", {"num_features": 5}, "needs the grid"),
        ("linformer", OWN["linformer"] | {"rel_pos": True}, "linformer attention has no relative"),
        ("performer", OWN["performer"] | {"rel_pos": True}, "performer attention has no relative"),
        ("srformer", OWN["srformer"] | {"rel_pos": True}, "srformer .* use the absolute embedding"),
        ("srformer", {"ratio": 0}, "ratio of spatial reduction must be at least 1, got 0"),
        ("srformer", {"ratio": 2, "ragged": "pda"}, "did you mean 'pad'"),
        ("global", {"num_global": 0}, "at least one global token"),
    ],
)
def test_wrong_settings_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        vil.build_attention(name, **({"dim": 8, "num_heads": 2} | arguments))


@pytest.mark.defect("B13")
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("separate", [False, True])
def test_macs_are_half_the_counted_flops_on_whole_chunks(name, separate):
    own = OWN.get(name, {}) | (SEPARATE.get(name, {}) if separate else {})
    own |= {"backend": "chunk_autograd"} if name == "longformer" else {}
    module = vil.build_attention(name, dim=8, num_heads=2, num_global=2, grid=(6, 9), **own)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(torch.randn(1, 56, 8), (6, 9))
    assert counter.get_total_flops() == 2 * module.macs((6, 9))


def test_print_tells_the_configuration():
    text = str(vil.build_attention("longformer", dim=8, num_heads=2, window=3, sw_exact=-1))
    assert "window=3" in text
    assert "sw_exact=-1" in text
    assert "backend=auto" in text


def test_case_of_a_pinned_backend_that_cannot_run():
    module = vil.build_attention(
        "longformer", dim=8, num_heads=2, window=3, sw_exact=-1, backend="masked"
    )
    assert BACKENDS["masked"].unsupported(Case(Window((3, 3), 3, -1), 1, 1, 4))
    with pytest.raises(ValueError, match="cannot run here: keys repeat"):
        module(torch.randn(1, 10, 8), (3, 3))
