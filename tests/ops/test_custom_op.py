"""Backends that compute the scores anew: seen by torch, checkpointed, and small in memory."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vil.ops import LocalBias, Window, local_attention
from vil.ops.backends import chunk_groups
from vil.ops.call_spec import CallSpec
from vil.ops.custom_op import met
from vil.utils.timing import peak_tensor_bytes

WINDOW = Window((12, 12), 4)


def made(grid=(12, 12), heads=2, dim=8):
    torch.manual_seed(0)
    length = grid[0] * grid[1]
    q, k, v = (torch.randn(2, heads, n, dim) for n in (length, length + 1, length + 1))
    return [x.requires_grad_() for x in (q, k, v)]


def attend(q, k, v, window=WINDOW, backend="blocked", bias=None):
    return local_attention(q, k, v, window, num_global=1, backend=backend, bias=bias)


def test_facts_come_back_from_their_numbers():
    for window in (WINDOW, Window.from_mode((7, 9), 3, -1, 5), Window((5, 4), 2, 1)):
        facts = CallSpec(window, 3, 0.25)
        assert CallSpec.of(facts.numbers(), 0.25) == facts


def test_compiling_sees_one_operator_and_changes_nothing():
    inputs = made()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found, wanted = compiled(*inputs), attend(*inputs)
    assert torch.equal(found, wanted)
    cotangent = torch.randn_like(wanted)
    pairs = [torch.autograd.grad(out, inputs, cotangent) for out in (found, wanted)]
    assert all(torch.equal(a, b) for a, b in zip(*pairs))


@pytest.mark.parametrize(("needless", "chunks"), [(0, 49), (chunk_groups.NEEDLESS, 81)])
def test_flops_are_those_of_the_chunks_that_are_met(needless, chunks, monkeypatch):
    """Of 3 x 3 chunks 4 see four, 4 see six and one sees nine: 49 pairs; with a border of empty
    chunks, for so small a grid, all see nine."""
    monkeypatch.setattr(chunk_groups, "NEEDLESS", needless)
    with FlopCounterMode(display=False) as counter:
        attend(*made()).sum().backward()
    pairs = chunks * 16 * 16 + 9 * 16  # and the global key of every token
    assert met(CallSpec(WINDOW, 1, 1.0), around=int(needless > 0)) == pairs
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 2 * 8 * pairs


def test_checkpointing_gives_the_same_gradients():
    inputs = made()
    plain = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    again = checkpoint(attend, *inputs, use_reentrant=False).square().sum()
    assert all(torch.equal(a, b) for a, b in zip(plain, torch.autograd.grad(again, inputs)))


def test_a_backward_inside_autocast_keeps_its_precision():
    inputs = made()
    plain = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast))


@pytest.mark.parametrize("biased", [pytest.param(False, marks=pytest.mark.long), True])
def test_scores_are_never_stored(biased):
    """Beside inputs, output and gradients it holds less than a quarter of the stored scores."""
    grid, inputs = (48, 48), made((48, 48))
    window, bias = Window(grid, 8), LocalBias(torch.randn(2, 31**2, requires_grad=True))

    def step(backend):
        out = attend(*inputs, window, backend, bias if biased else None)
        torch.autograd.grad(out.sum(), inputs)

    few, many = (
        peak_tensor_bytes(lambda name=name: step(name), torch.device("cpu"))
        for name in ("blocked", "chunk_handgrad")
    )
    assert few < many / 4
