"""Attention on joined projections as one compiled operation, and when the modules use it."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.common.compiled_layers import assert_traced_alike, assert_trains_alike
from tests.common.marks import cases
from vil.layers.attention import build_attention
from vil.layers.attention.base import GlobalLocalAttention
from vil.layers.attention.longformer import LongformerAttention
from vil.ops import LocalBias, Window
from vil.ops.custom_op import num_pairs
from vil.ops.dispatch import CHOICES
from vil.ops.linear_case import LinearCase
from vil.ops.native import library
from vil.ops.qkv_attention import attend_qkv

pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())
DTYPES = [torch.float32, *([torch.bfloat16] if library.has_bfloat16() else [])]
GRID = (7, 8)
SMALL = [  # settings of the module, grid
    (dict(window=3, num_global=1, rel_pos=True), GRID),
    (dict(window=3, num_global=2, rel_pos=True, mode=-1), GRID),
    (dict(window=3, num_global=0, rel_pos=True, sw_exact=1), GRID),
    (dict(name="pattern", pattern="axial", chunk=3, num_global=1, rel_pos=True), GRID),
]
LARGE = [
    (dict(window=3, num_global=3, sw_exact=-1), GRID),
    (dict(window=7, num_global=1, rel_pos=True, num_heads=1, dim=48), (20, 30)),  # bands of rows
    (dict(name="pattern", pattern="local:2", chunk=2, num_global=0), GRID),
    (dict(window=4, num_global=20, rel_pos=True, num_heads=4, dim=12), (5, 5)),
]


def build(name="longformer", *, dim=40, num_heads=2, **settings):
    torch.manual_seed(0)
    settings = settings if name == "full" else dict(backend="native") | settings
    module = build_attention(name, dim=dim, num_heads=num_heads, grid=GRID, **settings)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def make_qkv(module, grid, dtype=torch.float32):
    tokens = module.num_global + grid[0] * grid[1]
    qkv = torch.randn(2, tokens, 3 * module.dim, dtype=torch.float64)
    return qkv.to(dtype).requires_grad_()


def results(module, attend, qkv, grid):
    """Return the output, and the gradients of qkv and of the biases."""
    qkv = qkv.detach().to(qkv.dtype).requires_grad_()
    out = attend(qkv, grid)
    biases = list(module.parameters(recurse=False))
    torch.manual_seed(1)
    cotangent = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, (qkv, *biases), cotangent)
    return [out, *grads]


def separately(module):
    """Return the function that computes attention by one operation for local tokens and another
    for global tokens."""
    return partial(GlobalLocalAttention.attend_qkv, module)


def spy(monkeypatch):
    """Return a list that gets an item for each call of `attend_qkv`."""
    calls = []

    def counted(*args, **settings):
        calls.append(args)
        return attend_qkv(*args, **settings)

    for module in ("local", "full"):
        monkeypatch.setattr(f"vil.layers.attention.{module}.attend_qkv", counted)
    return calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases(SMALL + LARGE, long=LARGE), ids=str)
def test_it_equals_separate_operations(case, dtype, threads, monkeypatch):
    settings, grid = case
    module, calls = build(**settings), spy(monkeypatch)
    qkv = make_qkv(module, grid, dtype)
    found = results(module, module.attend_qkv, qkv, grid)
    again = results(module, module.attend_qkv, qkv, grid)
    assert all(map(torch.equal, found, again))
    assert len(calls) == 2
    plain = results(module, separately(module), qkv, grid)
    module.double().backend = "auto"
    exact = results(module, separately(module), qkv.double(), grid)
    for got, near, wanted in zip(found, plain, exact, strict=True):
        if not wanted.numel():
            continue
        bound = 4 * (near - wanted).abs().max()
        bound += 16 * torch.finfo(near.dtype).eps * wanted.abs().max()
        assert got.dtype == near.dtype
        assert (got - wanted).abs().max() <= bound


def overrides(**methods):
    return type("Own", (LongformerAttention,), methods)


def zeros(self, q, k, v, *rest):
    return torch.zeros_like(q)


def test_wrong_shapes_are_errors_and_no_images_are_fine():
    module = build(window=3, num_global=1, rel_pos=True)
    with pytest.raises(ValueError, match="q has 19 tokens, but the window's grid"):
        module.attend_qkv(torch.randn(2, 20, 120), GRID)
    window, heads = Window(GRID, 3), dict(num_heads=2, scale=1.0)
    with pytest.raises(ValueError, match=r"qkv must be \(B, 57, 3C\) for 1 global tokens"):
        attend_qkv(torch.randn(2, 20, 120), window, num_global=1, **heads)
    bias = LocalBias(torch.randn(2, 120), None)
    with pytest.raises(ValueError, match=r"a bias of shape \(2, 121\), got \(2, 120\)"):
        attend_qkv(torch.randn(2, 56, 120), window, bias=bias, **heads)
    qkv, table = (
        torch.randn(0, 56, 120, requires_grad=True),
        torch.randn(2, 121, requires_grad=True),
    )
    out = attend_qkv(qkv, window, bias=LocalBias(table, None), **heads)
    assert out.shape == (0, 56, 40)
    grads = torch.autograd.grad(out.sum(), (qkv, table))
    assert grads[0].shape == qkv.shape
    assert not grads[1].any()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "__class__", overrides(attend_global=zeros)),
        lambda m: setattr(m, "__class__", overrides(attend_local=zeros)),
        lambda m: setattr(m, "merge_heads", lambda x: 2 * type(m).merge_heads(m, x)),
        lambda m: setattr(m, "attn_drop", 0.5),
        lambda m: setattr(m, "backend", "blocked"),
    ],
    ids=["global", "local", "object", "dropout", "backend"],
)
def test_modules_that_compute_something_else_use_their_methods(change, monkeypatch):
    module, calls = build(window=3, num_global=1), spy(monkeypatch)
    qkv = make_qkv(module, GRID)
    module.attend_qkv(qkv, GRID)
    assert len(calls) == 1
    change(module)
    if module.backend == "native" and module.attn_drop:
        with pytest.raises(ValueError, match="dropout"):
            module.attend_qkv(qkv, GRID)
    else:
        found = module.attend_qkv(qkv, GRID)
        assert torch.equal(found, separately(module)(qkv, GRID))
    assert len(calls) == 1


def test_other_devices_empty_batches_and_transforms(monkeypatch):
    module, calls = build(window=3, num_global=1, rel_pos=True), spy(monkeypatch)
    qkv = make_qkv(module, GRID).detach()
    assert module.attend_qkv(qkv[:0], GRID).shape == (0, 57, 40)
    tangents = [
        torch.func.jvp(partial(attend, grid=GRID), (qkv,), (qkv,))[1]
        for attend in (module.attend_qkv, separately(module))
    ]
    torch.testing.assert_close(*tangents)
    module.backend = "auto"
    assert module.to("meta").attend_qkv(qkv.to("meta"), GRID).shape == (2, 57, 40)
    assert not calls


def test_traced_it_gives_the_same_outputs():
    module = build(window=3, num_global=1, rel_pos=True)
    qkv = make_qkv(module.requires_grad_(False), GRID).detach()

    def attend(x):  # with or without a batch
        return module.attend_qkv(x.reshape(-1, *qkv.shape[1:]), GRID).reshape(*x.shape[:-1], 40)

    assert_traced_alike(attend, qkv, attend(qkv))


def test_checkpointing_and_second_derivatives():
    module = build(window=3, num_global=1)
    qkv = make_qkv(module, GRID)

    def loss(x):
        return module.attend_qkv(x, GRID).square().sum()

    (plain,) = torch.autograd.grad(loss(qkv), qkv)
    (again,) = torch.autograd.grad(checkpoint(loss, qkv, use_reentrant=False), qkv)
    assert torch.equal(plain, again)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss(qkv), qkv, create_graph=True)


def test_its_multiplications_are_counted():
    module = build(window=4, num_global=2)
    qkv = make_qkv(module, GRID)
    with FlopCounterMode(display=False) as counter:
        module.attend_qkv(qkv, GRID).sum().backward()
    pairs = num_pairs(Window(GRID, 4), 2) + 2 * 58
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 40 * pairs


def test_a_model_trains_alike(monkeypatch):
    monkeypatch.setattr(LinearCase, "bucket", lambda case: "linear")
    monkeypatch.setattr("vil.ops.dispatch.tuned", lambda case: "native" if CHOICES else None)
    CHOICES["linear"] = "native"
    calls = spy(monkeypatch)
    assert_trains_alike()
    assert len(calls) > 1
