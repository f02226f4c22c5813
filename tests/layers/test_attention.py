"""Attention modules: the reference's outputs and gradients, modes, padding, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import vil
from vil.layers.attention import ATTENTIONS, set_progress
from vil.models.checkpoint import load_original
from vil.ops import BACKENDS, Case, Window
from vil.utils.progress import Progress

GOLDEN = Path(__file__).parent.parent / "golden"
LOCAL = sorted(path.stem for path in GOLDEN.glob("local_*.safetensors"))
FULL = sorted(path.stem for path in GOLDEN.glob("full_*.safetensors"))


def read(name: str) -> tuple[dict, dict, dict, dict]:
    """The arguments, tensors, parameters and gradients of a golden file."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        meta = json.loads(file.metadata()["meta"])
    parts = [
        {
            key.removeprefix(prefix): value
            for key, value in tensors.items()
            if key.startswith(prefix)
        }
        for prefix in ("param.", "grad.")
    ]
    return meta, tensors, *parts


def build(meta: dict, backend: str) -> torch.nn.Module:
    common = dict(
        dim=meta["dim"],
        num_heads=meta["heads"],
        num_global=meta["n_global"],
        rel_pos=meta["rpe"],
        grid=(meta["nx"], meta["ny"]),
    )
    if meta["kind"] == "full":
        return vil.build_attention("full", **common)
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


def step_with_mode(module: torch.nn.Module, mode: int) -> None:
    """Random shift draws its neighbour from the step: go to a step at which it draws this one."""
    for step in range(200):
        set_progress(module, Progress(step=step))
        if module.current_mode() == mode:
            return
    raise AssertionError(f"mode {mode} was never drawn")


def accepted(name: str) -> list[str]:
    """The backends that accept a golden case; one stands for all where the module has none."""
    meta = read(name)[0]
    if meta["kind"] == "full" or meta["only_global"]:
        return ["auto"]
    grid = (meta["nx"], meta["ny"])
    window = Window.from_mode(grid, meta["window"], meta["sw_exact"], meta["mode"])
    case = Case(window, 2, meta["heads"], meta["dim"] // meta["heads"], meta["n_global"])
    return [name for name, backend in BACKENDS.items() if not backend.unsupported(case)]


@pytest.mark.parametrize(
    ("name", "backend"), [(name, b) for name in LOCAL + FULL for b in accepted(name)]
)
def test_outputs_and_gradients_of_the_reference(name, backend):
    meta, tensors, params, grads = read(name)
    module = build(meta, backend).double().train(meta.get("training", False))
    load_original(module, params)
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


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("rel_pos", [False, True])
def test_padding_changes_nothing_for_real_tokens(name, rel_pos):
    """An image beside a larger one in a batch gives the same rows as alone: keys beyond `valid` are
    never seen.
    """
    torch.manual_seed(0)
    own = {"longformer": {"window": 2}}.get(name, {})
    module = vil.build_attention(
        name, dim=8, num_heads=2, num_global=2, grid=(5, 4), rel_pos=rel_pos, **own
    ).double()
    x = torch.randn(1, 2 + 20, 8, dtype=torch.float64)
    padded = torch.randn(1, 7, 6, 8, dtype=torch.float64)
    padded[:, :5, :4] = x[:, 2:].unflatten(1, (5, 4))
    padded = torch.cat([x[:, :2], padded.flatten(1, 2)], dim=1)
    out = module(padded, (7, 6), valid=torch.tensor([[5, 4]]))
    if name == "full" and rel_pos:  # its table is resized to the larger grid: only repeatable
        assert torch.equal(out, module(padded, (7, 6), valid=torch.tensor([[5, 4]])))
        other = padded.clone()
        other[:, -1] = 9.0
        assert torch.allclose(
            out[:, :-1], module(other, (7, 6), valid=torch.tensor([[5, 4]]))[:, :-1]
        )
        return
    alone = module(x, (5, 4))
    assert torch.allclose(out[:, :2], alone[:, :2])
    assert torch.allclose(out[:, 2:].unflatten(1, (7, 6))[:, :5, :4].flatten(1, 2), alone[:, 2:])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_parameter_gets_a_gradient(name):
    own = {
        "longformer": {"window": 2, "share_weights": False},
        "global": {"share_weights": False},
    }.get(name, {})
    module = vil.build_attention(name, dim=8, num_heads=2, grid=(3, 4), rel_pos=True, **own)
    module(torch.randn(2, 13, 8), (3, 4)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_random_shift_asks_for_the_step():
    """Without it every step would draw the same neighbour, unnoticed."""
    module = vil.build_attention("longformer", dim=4, num_heads=1, window=2, mode=1)
    with pytest.raises(RuntimeError, match="set_progress"):
        module(torch.randn(1, 5, 4), (2, 2))
    module.eval()(torch.randn(1, 5, 4), (2, 2))


def test_random_shift_is_a_function_of_seed_step_and_module():
    def draws(seed: int) -> list[tuple[int, int]]:
        modules = torch.nn.ModuleList(
            vil.build_attention("longformer", dim=4, num_heads=1, window=2, mode=1)
            for _ in range(2)
        )
        out = []
        for step in range(100):
            set_progress(modules, Progress(seed=seed, step=step))
            out.append(tuple(module.current_mode() for module in modules))
        return out

    first = draws(0)
    assert first == draws(0)
    assert first != draws(1)
    assert {mode for pair in first for mode in pair} == set(range(1, 9))
    assert any(a != b for a, b in first)


def test_random_shift_ends_at_the_epoch_of_the_rule(caplog):
    module = vil.build_attention(
        "longformer", dim=4, num_heads=1, window=2, mode=1, mode_switch=0.75
    )
    modes = []
    with caplog.at_level("INFO"):
        for epoch in range(10):
            set_progress(module, Progress(step=epoch, epoch=epoch, epochs=10))
            modes.append(module.current_mode())
    assert all(mode > 0 for mode in modes[:8])  # 0.75 * 10 = 7.5: epochs 0..7
    assert modes[8:] == [0, 0]
    assert [record.getMessage() for record in caplog.records] == [
        "random shift is over, all nine chunks from epoch 8 (1 attention modules)"
    ]
    assert module.eval().current_mode() == 0


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
        ("global", {"num_global": 0}, "at least one global token"),
    ],
)
def test_wrong_settings_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        vil.build_attention(name, **({"dim": 8, "num_heads": 2} | arguments))


def test_macs_are_half_the_counted_flops_on_whole_chunks():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    cases = {
        "longformer": {"window": 3, "backend": "chunk_autograd", "share_weights": False},
        "full": {},
        "global": {"share_weights": True},
    }
    assert cases.keys() == ATTENTIONS.keys()
    for name, own in cases.items():
        module = vil.build_attention(name, dim=8, num_heads=2, num_global=2, grid=(6, 9), **own)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            module(torch.randn(1, 56, 8), (6, 9))
        assert counter.get_total_flops() == 2 * module.macs((6, 9)), name


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
