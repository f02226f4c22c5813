"""The operation under torch.func, forward-mode AD, NaN in the padding, compile and export."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import vil
from vil.layers.attention import ATTENTIONS, build_attention
from vil.ops import BACKENDS, LocalBias, Window, local_attention
from vil.ops.attention_case import Case
from vil.ops.window import real_cells

pytestmark = pytest.mark.trust(10)

F64 = torch.float64


def can_run(backend, mask=1, dtype=F64):
    """Whether a backend computes the small exact windows of these tests here."""
    case = Case(Window((6, 7), 3, mask), 2, 2, 4, 1, dtype, table_bias=True, global_bias=True)
    return not BACKENDS[backend].unsupported(replace(case, valid=True))


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def by_dual_tensors(function, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


@pytest.mark.parametrize("transform", ["torch.func", "dual tensors"])
def test_jvp_of_a_model_is_its_central_difference(transform):
    """A silent zero in the operator would leave a plausible jvp of the rest."""
    torch.manual_seed(0)
    model = vil.get_model("vil_tiny_rpb", num_classes=5, img_size=64).to(F64).eval()
    x, tangent, step = draw(1, 3, 64, 64), draw(1, 3, 64, 64, seed=1), 1e-5
    if transform == "dual tensors":
        found = by_dual_tensors(model, x, tangent)
    else:
        found = jvp(model, (x,), (tangent,))[1]
    with torch.no_grad():
        difference = (model(x + step * tangent) - model(x - step * tangent)) / (2 * step)
    assert relative(found, difference) < 1e-6


@pytest.mark.parametrize("backend", list(filter(can_run, BACKENDS)))
def test_jvp_of_every_backend(backend):
    grid, window = (5, 6), Window((5, 6), 2, 1)
    q, k, v = draw(1, 2, 30, 4), draw(1, 2, 31, 4, seed=1), draw(1, 2, 31, 4, seed=2)
    bias = LocalBias(draw(2, 49, seed=3), draw(2, 1, seed=4))

    def attend(q):
        return local_attention(q, k, v, window, num_global=1, bias=bias, backend=backend)

    tangent, step = draw(1, 2, grid[0] * grid[1], 4, seed=5), 1e-5
    difference = (attend(q + step * tangent) - attend(q - step * tangent)) / (2 * step)
    assert relative(jvp(attend, (q,), (tangent,))[1], difference) < 1e-8
    assert relative(by_dual_tensors(attend, q, tangent), difference) < 1e-8


def test_per_sample_gradients_are_those_of_a_loop():
    torch.manual_seed(0)
    model = vil.get_model("vil_nano").to(F64).eval()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    images, targets = draw(3, 3, 64, 64), torch.arange(3)

    def loss(parameters, image, target):
        logits = functional_call(model, parameters, (image[None],))
        return F.cross_entropy(logits, target[None])

    found = vmap(grad(loss), (None, 0, 0))(parameters, images, targets)
    for number in range(3):
        model.zero_grad()
        F.cross_entropy(model(images[number, None]), targets[number, None]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name][number], parameter.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", [*filter(can_run, BACKENDS), "reference"])
def test_bad_numbers_in_the_padding_reach_no_real_query(backend, bad):
    from vil.ops import reference

    grid, window, dtype = (6, 7), Window((6, 7), 3, 1), torch.float32
    valid_hw = torch.tensor([[6, 7], [4, 5]])
    real = real_cells(valid_hw, grid).flatten(2)[..., None]  # (B, 1, L, 1)
    q, k, v = (draw(2, 2, 42 + g, 4, seed=g).to(dtype) for g in (0, 1, 1))
    bias = LocalBias(draw(2, 121).to(dtype), draw(2, 1).to(dtype))
    options = dict(num_global=1, bias=bias, valid_hw=valid_hw)
    if backend == "reference":
        attend = reference.attend
    else:
        options["backend"], attend = backend, local_attention
    spoiled = [q.masked_fill(~real, bad)]
    spoiled += [x.masked_fill(~F.pad(real, (0, 0, 1, 0), value=True), bad) for x in (k, v)]
    for x in spoiled:
        x.requires_grad_()
    clean, out = attend(q, k, v, window, **options), attend(*spoiled, window, **options)
    seen = real.expand_as(out)
    assert torch.equal(clean[seen], out[seen])
    if backend != "reference":
        assert all(g.isfinite().all() for g in torch.autograd.grad(out[seen].sum(), spoiled))


@pytest.mark.parametrize("name", list(ATTENTIONS))
def test_bad_numbers_in_the_padding_of_every_module(name):
    """Global and local rows, forward and gradients of the parameters."""
    grid, valid_hw = (6, 7), torch.tensor([[6, 7], [4, 5]])
    own = dict(longformer={"window": 3}, linformer={"num_features": 4}, srformer={"ratio": 2})
    own |= dict(performer={"num_features": 8})
    torch.manual_seed(0)
    arguments = dict(dim=8, num_heads=2, num_global=1, grid=grid, **own.get(name, {}))
    module = build_attention(name, **arguments).eval()
    x = draw(2, 43, 8).float()
    real = F.pad(real_cells(valid_hw, grid).flatten(1), (1, 0), value=True)[..., None]
    outs, grads = [], []
    for given in (x.masked_fill(~real, 0.5), x.masked_fill(~real, float("nan"))):
        module.zero_grad()
        out = module(given, grid, valid_hw)[real.expand(-1, -1, 8)]
        out.square().sum().backward()
        outs.append(out)
        grads.append([p.grad for p in module.parameters() if p.grad is not None])
    assert torch.equal(*outs)
    for clean, spoiled in zip(*grads):
        torch.testing.assert_close(spoiled, clean)


def test_an_exported_program_needs_no_operator_of_ours():
    model = vil.get_model("vil_nano").eval()
    program = torch.export.export(model, (torch.zeros(1, 3, 64, 64),), strict=False)
    assert not [node for node in program.graph.nodes if "vil" in str(node.target)]
