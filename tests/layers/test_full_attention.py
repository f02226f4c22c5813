"""Full attention by the compiled backend of local attention, and by torch."""

import pytest
import torch

from tests.common.native_cache import needs_compiler
from vil.layers.attention import full
from vil.layers.attention.full import FullAttention
from vil.ops import Case
from vil.ops.dispatch import CHOICES
from vil.ops.native import library
from vil.ops.testing import differences

SDPA = "masked"  # which torch's fused attention computes here
DTYPES = [torch.float32, *([torch.bfloat16] if library.has_bfloat16() else [])]
GRIDS = [(1, 1), (1, 4), (7, 5), (3, 8)]


def build(grid: tuple[int, int], num_global: int, **more) -> FullAttention:
    torch.manual_seed(0)
    module = FullAttention(24, 3, grid=grid, num_global=num_global, **more)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def select(module: FullAttention, grid, backend: str, **call) -> None:
    call = dict(batch=2, dtype=torch.float32, device="cpu") | call
    for case in module.backend_cases(grid, training=True, **call):
        CHOICES[case.bucket()] = backend


def results(module: FullAttention, x: torch.Tensor, grid) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    out = module(x, grid)
    torch.manual_seed(1)
    grads = torch.autograd.grad(out, (x, *module.parameters()), torch.randn_like(out).to(out.dtype))
    return [out, *grads]


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of qkv in calls of the compiled backend."""
    found = []

    def attend(qkv, *args, **more):
        found.append(tuple(qkv.shape))
        return attend_qkv(qkv, *args, **more)

    attend_qkv = full.attend_qkv
    monkeypatch.setattr(full, "attend_qkv", attend)
    return found


@needs_compiler
@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_global", [0, 2])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_tuned_backend_gives_the_same_outputs_and_gradients(grid, num_global, dtype, calls):
    module = build(grid, num_global)
    x = torch.randn(2, num_global + grid[0] * grid[1], 24)
    exact = results(module.double(), x.double(), grid)
    module.float()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        select(module, grid, SDPA, dtype=dtype)
        plain = results(module, x, grid)
        assert not calls
        select(module, grid, "native", dtype=dtype)
        found = results(module, x, grid)
        with torch.no_grad():
            torch.testing.assert_close(module(x, grid), found[0])
    for got, near, wanted in zip(found, plain, exact, strict=True):
        error, bound = ((tensor - wanted).abs().max() for tensor in (got, near))
        assert error <= 3 * bound + 1e-5 * wanted.abs().max()
    assert calls == [(*x.shape[:2], 3 * 24)] * 2


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 33, 197, 700])
def test_it_equals_the_reference_on_a_line_of_tokens(tokens, dtype):
    case = Case(full.one_chunk((1, tokens)), 1, 2, 16, dtype=dtype)
    for key, (error, bound) in differences(case, "native", "masked").items():
        assert error <= bound, f"{key}: {error:.2g} > {bound:.2g}"


def test_padding_dropout_and_transforms_use_torch(calls):
    grid = (4, 4)
    module = build(grid, 1)
    x = torch.randn(2, 17, 24)
    select(module, grid, "native")
    module(x, grid, valid_hw=torch.tensor([[4, 4], [2, 3]]))
    torch.func.jvp(lambda x: module(x, grid), (x,), (x,))
    module.attn_drop = 0.5
    module(x, grid)
    module.attn_drop = 0.0
    select(module, grid, SDPA)
    module(x, grid)
    assert not calls
