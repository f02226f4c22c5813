"""Backends that recompute the scores: compiled, checkpointed, with little memory."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vil.ops import BACKENDS, Case, Layout, LocalBias, Window, local_attention, patterns
from vil.ops.call import to_numbers
from vil.utils.timing import peak_tensor_bytes

WINDOW = Window((12, 12), 4)
AXIAL = Layout((12, 12), 4, patterns.axial())


def make(grid=(12, 12), heads=2, dim=8):
    torch.manual_seed(0)
    length = grid[0] * grid[1]
    q, k, v = (torch.randn(2, heads, n, dim) for n in (length, length + 1, length + 1))
    return [x.requires_grad_() for x in (q, k, v)]


def attend(q, k, v, window=WINDOW, backend="blocked", bias=None):
    return local_attention(q, k, v, window, num_global=1, backend=backend, bias=bias)


@pytest.mark.parametrize("backend", ["blocked", "native"])
@pytest.mark.parametrize("window", [WINDOW, AXIAL], ids=["window", "layout"])
def test_compiling_changes_nothing(window, backend):
    if BACKENDS[backend].reasons_against(Case(window, 2, 2, 8, 1)):
        pytest.skip("it cannot run here")
    inputs = make()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found, wanted = (each(*inputs, window, backend) for each in (compiled, attend))
    assert torch.equal(found, wanted)
    cotangent = torch.randn_like(wanted)
    pairs = [torch.autograd.grad(out, inputs, cotangent) for out in (found, wanted)]
    assert all(torch.equal(a, b) for a, b in zip(*pairs))


@pytest.mark.parametrize(
    ("window", "pairs"),
    [(WINDOW, 49), (Layout((12, 12), 4, patterns.swin(4)), 9)],
    ids=["window", "layout"],
)
def test_flops_count_the_attended_chunks(window, pairs):
    """Of 3 x 3 chunks 4 attend to four, 4 to six and one to nine, or each to itself."""
    with FlopCounterMode(display=False) as counter:
        attend(*make(), window).sum().backward()
    pairs = pairs * 16 * 16 + 9 * 16  # plus the global key of every token
    assert counter.get_total_flops() == 2 * (2 + 5) * 2 * 2 * 8 * pairs


def test_checkpointing_gives_the_same_gradients():
    inputs = make()
    plain = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    recomputed = checkpoint(attend, *inputs, use_reentrant=False).square().sum()
    assert all(torch.equal(a, b) for a, b in zip(plain, torch.autograd.grad(recomputed, inputs)))


def test_a_backward_inside_autocast_keeps_its_precision():
    inputs = make()
    plain = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast))


@pytest.mark.long
@pytest.mark.parametrize("biased", [False, True])
def test_scores_are_never_stored(biased):
    """Peak memory is less than a quarter of that with stored scores."""
    grid, inputs = (80, 80), make((80, 80))
    window, bias = Window(grid, 8), LocalBias(torch.randn(2, 31**2, requires_grad=True))

    def step(backend):
        out = attend(*inputs, window, backend, bias if biased else None)
        torch.autograd.grad(out.sum(), inputs)

    few, many = (
        peak_tensor_bytes(lambda name=name: step(name), torch.device("cpu"))
        for name in ("blocked", "chunk_handgrad")
    )
    assert few < many / 4


@pytest.mark.parametrize("backend", ["blocked", "native", "triton"])
@pytest.mark.parametrize("window", [WINDOW, AXIAL], ids=str)
def test_inference_gives_the_same_output_and_saves_no_log_sum_exp(window, backend):
    q, k, v = (x[:, :, -144:] for x in make())
    valid = torch.tensor([[12, 5], [3, 12]])  # some queries have no keys
    options = dict(window=window, valid_hw=valid, backend=backend)
    if BACKENDS[backend].reasons_against(Case(window, 2, 2, 8, 0, valid=True)):
        pytest.skip("it cannot run here")
    trained = local_attention(q, k, v, **options)
    assert trained.grad_fn is not None
    with torch.no_grad():
        assert torch.equal(local_attention(q, k, v, **options), trained)
    operator = getattr(torch.ops.vil, backend)
    arguments = (q, k, v, None, None, valid, None, to_numbers(window, 0), 0.3)
    assert operator(*arguments)[1].shape == (2, 2, 144)
    assert operator(*arguments, False)[1].numel() == 0
    torch.library.opcheck(operator, (*arguments, False), test_utils="test_faketensor")
