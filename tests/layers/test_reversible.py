"""Reversible blocks: gradients equal those of the two-stream formula, whatever is sampled."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from vil.layers.attention import ATTENTIONS, build_attention, set_progress
from vil.layers.block import Block
from vil.layers.reversible import run_reversible
from vil.utils.train_step import TrainStep

pytestmark = pytest.mark.smoke
FEATURES = {"longformer": "window", "linformer": "num_features", "performer": "num_features",
            "srformer": "ratio"}  # fmt: skip
SHIFT = {"longformer": {"mode": 1}}
# global attention needs a global token
KINDS = [(name, n) for name in ATTENTIONS for n in (0, 2) if (name, n) != ("global", 0)]


def make_blocks(name="longformer", *, grid=(7, 8), num_global=2, dim=6, num_heads=2, rate=0.2,
                num=3, **own):  # fmt: skip
    torch.manual_seed(0)
    own |= {FEATURES[name]: 3} if name in FEATURES else {}
    blocks = nn.ModuleList()
    for _ in range(num):
        attn = build_attention(
            name, dim=dim, num_heads=num_heads, num_global=num_global, grid=grid, attn_drop=rate,
            proj_drop=rate, rel_pos=ATTENTIONS.load(name).has_relative_bias, **own,
        )  # fmt: skip
        blocks.append(Block(attn, drop=rate, drop_path=rate))
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.3)
    set_progress(blocks, TrainStep(seed=3, step=17))
    return blocks.double().train()


def make_tokens(blocks, grid, batch=3):
    tokens = blocks[0].attn.num_global + grid[0] * grid[1]
    generator = torch.Generator().manual_seed(1)
    shape = (batch, tokens, blocks[0].attn.dim)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def two_streams(blocks, x, grid, valid_hw=None):
    """The formula: y1 = x1 + F(x2), y2 = x2 + G(y1); the mean of both at the end."""
    x1 = x2 = x
    for block in blocks:
        x1 = x1 + block.drop_path(block.attn(block.norm1(x2), grid, valid_hw))
        x2 = x2 + block.drop_path(block.mlp(block.norm2(x1)))
    return (x1 + x2) / 2


def recomputed(blocks, x, grid, valid_hw=None):
    return run_reversible(blocks, x, grid, valid_hw, recompute=True)


class Wrapped(nn.Module):
    """Blocks and the function that runs them, as a module."""

    def __init__(self, blocks, run):
        super().__init__()
        self.blocks, self.run = blocks, run

    def forward(self, x):
        return self.run(self.blocks, x, (7, 8))


def gradients(run, blocks, x, grid, valid_hw=None, weight=None):
    """Output, and gradients of the input and all parameters, from the same random numbers."""
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    out = run(blocks, x, grid, valid_hw)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad((out * weight).sum(), [x, *blocks.parameters()], allow_unused=True)
    return [out, *grads]


def assert_equal(found, wanted, tolerance=1e-9):
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("grid", [(1, 1), (7, 8)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "num_global"), KINDS)
def test_gradients_are_those_of_the_formula(name, padded, num_global, grid):
    """With dropout, drop path and random shift; longformer's first image has no padding."""
    blocks = make_blocks(name, grid=grid, num_global=num_global, **SHIFT.get(name, {}))
    x = make_tokens(blocks, grid)
    valid_hw = torch.tensor([grid, (1, 1), (min(5, grid[0]), 1)]) if padded else None
    wanted = gradients(two_streams, blocks, x, grid, valid_hw)
    found = gradients(recomputed, blocks, x, grid, valid_hw)
    assert torch.equal(found[0], wanted[0])
    assert_equal(found, wanted)


def test_random_numbers_after_a_backward_pass_are_those_without_recomputation():
    after = []
    for run in (recomputed, two_streams):
        blocks = make_blocks()
        gradients(run, blocks, make_tokens(blocks, (7, 8)), (7, 8))
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_two_passes_before_one_backward_pass_repeat_their_own_random_numbers():
    """Gradients of a sum of two calls with other masks; the masks of each call are repeated."""
    blocks = make_blocks()
    x = make_tokens(blocks, (7, 8))

    def twice(run):
        return lambda blocks, x, grid, valid_hw: run(blocks, x, grid) + 2 * run(blocks, 2 * x, grid)

    grids = (7, 8)
    assert_equal(*(gradients(twice(run), blocks, x, grids) for run in (recomputed, two_streams)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_repeats_the_precision_of_the_forward_pass(dtype, inside):
    """Odd widths; also for a backward pass inside of the context, whose casts are cached."""
    blocks = make_blocks(dim=5, num_heads=1, num_global=1).float()
    found = []
    for run in (recomputed, two_streams):
        x = make_tokens(blocks, (7, 8)).float().requires_grad_()
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype):
            out = run(blocks, x, (7, 8))
            if inside:
                out.square().sum().backward()
        if not inside:
            out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in blocks.parameters())])
        blocks.zero_grad()
    assert found[0][0].dtype == torch.float32
    assert torch.equal(found[0][0], found[1][0])
    # inputs that float32 restores up to its rounding: few of them round to another value
    assert_equal(*found, tolerance=torch.finfo(dtype).eps)


def test_a_pass_in_the_same_autocast_context_gets_its_gradients():
    """Weights that the first pass casts without a graph are not used by the second one."""
    blocks, found = make_blocks(rate=0.0).float(), []
    x = make_tokens(blocks, (7, 8)).float()
    for first in (recomputed, two_streams):
        with torch.autocast("cpu", torch.bfloat16):
            first(blocks, x, (7, 8))
            out = two_streams(blocks, x, (7, 8))
        grads = torch.autograd.grad(out.square().sum(), list(blocks.parameters()))
        found.append(grads)
    assert_equal(*found, tolerance=0)


def test_a_model_in_bfloat16_keeps_its_streams_in_float32():
    blocks = make_blocks(rate=0.0, num=8).bfloat16()
    x = make_tokens(blocks, (7, 8)).bfloat16()
    found = gradients(recomputed, blocks, x, (7, 8))
    assert found[0].dtype == torch.bfloat16

    def stored(blocks, x, grid, valid_hw):
        return run_reversible(blocks, x, grid, valid_hw, recompute=False)

    assert_equal(found, gradients(stored, blocks, x, (7, 8)), tolerance=2e-2)


@pytest.mark.long
def test_float32_gradients_of_48_blocks():
    """Rounding errors of recomputed inputs do not pile up."""
    blocks = make_blocks(num=48).float()
    x = make_tokens(blocks, (7, 8)).float()
    assert_equal(
        *(gradients(run, blocks, x, (7, 8)) for run in (recomputed, two_streams)), tolerance=1e-4
    )


def test_hooks_and_accumulation_see_each_gradient_once():
    blocks = make_blocks(rate=0.0)
    x, weight = make_tokens(blocks, (7, 8)), blocks[1].mlp.fc1.weight
    seen = []
    weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    wanted = gradients(two_streams, make_blocks(rate=0.0), x, (7, 8))
    at = 2 + [name for name, _ in blocks.named_parameters()].index("1.mlp.fc1.weight")
    for call in (1, 2):
        out = recomputed(blocks, x, (7, 8))
        out.backward(torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out))
        assert len(seen) == 2 * call
        assert_equal([seen[-2], seen[-1]], [wanted[at], 2 * call * wanted[at]])


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp_reduces_each_gradient_once(options, tmp_path):
    """In one process; tests/cli/test_reversible_runs.py trains with two."""
    blocks = make_blocks(rate=0.0)
    x = make_tokens(blocks, (7, 8))
    wanted = gradients(two_streams, blocks, x, (7, 8))[2:]
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Wrapped(blocks, recomputed), **options)
        for step in (1, 2):
            with model.no_sync() if step == 1 and not options else nullcontext():
                out = model(x)
                weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
                out.backward(weight)
            assert_equal([p.grad for p in blocks.parameters()], [step * grad for grad in wanted])
    finally:
        torch.distributed.destroy_process_group()


def test_a_graph_can_be_kept():
    blocks = make_blocks()
    x = make_tokens(blocks, (7, 8)).requires_grad_()
    loss = recomputed(blocks, x, (7, 8)).square().sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_frozen_parameters_and_inputs_get_no_gradient():
    blocks = make_blocks()
    blocks[1].requires_grad_(False)
    blocks[2].mlp.fc1.bias.requires_grad_(False)
    x = make_tokens(blocks, (7, 8))
    for run in (recomputed, two_streams):
        torch.manual_seed(5)
        run(blocks, x, (7, 8)).square().sum().backward()
        yet = {name: p.grad for name, p in blocks.named_parameters() if p.grad is not None}
        if run is recomputed:
            found = yet
        blocks.zero_grad()
    assert set(found) == set(yet)
    assert not any(name.startswith("1.") for name in found)
    assert_equal(found.values(), yet.values())


def test_without_gradients_nothing_is_stored():
    blocks = make_blocks().eval()
    x = make_tokens(blocks, (7, 8)).requires_grad_()
    with torch.no_grad():
        out = recomputed(blocks, x, (7, 8))
    assert not out.requires_grad
    assert torch.allclose(out, two_streams(blocks, x, (7, 8)))
    assert torch.equal(recomputed(blocks.requires_grad_(False), x.detach(), (7, 8)), out)


def test_func_transforms_compute_the_formula():
    blocks = make_blocks(rate=0.0).eval()
    x = make_tokens(blocks, (7, 8))
    found = []
    for run in (recomputed, two_streams):

        def loss(x, run=run):
            return run(blocks, x, (7, 8)).square().sum()

        each = torch.func.vmap(torch.func.grad(lambda x, loss=loss: loss(x[None])))(x)
        _, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
        one = torch.ones((), dtype=torch.float64)
        second = torch.func.hessian(lambda scale, loss=loss: loss(scale * x))(one)
        found.append([each, tangent, second])
    assert_equal(*found)


def test_second_derivatives_are_refused_in_a_sentence():
    blocks = make_blocks(rate=0.0)
    x = make_tokens(blocks, (7, 8)).requires_grad_()
    loss = recomputed(blocks, x, (7, 8)).square().sum()
    with pytest.raises(RuntimeError, match="no second derivative.*store_activations"):
        torch.autograd.grad(loss, x, create_graph=True)
    out = recomputed(blocks, x, (7, 8))
    with pytest.raises(RuntimeError, match="inside a torch.func transform.*store_activations"):
        torch.func.vmap(lambda grad: torch.autograd.grad(out, x, grad))(out.detach()[None])


@pytest.mark.parametrize("change", ["eval", "progress", "weights"])
def test_a_model_that_changed_before_its_backward_pass_is_refused(change):
    blocks = make_blocks(**SHIFT["longformer"])
    loss = recomputed(blocks, make_tokens(blocks, (7, 8)), (7, 8)).square().sum()
    if change == "eval":
        blocks.eval()
    elif change == "progress":
        set_progress(blocks, TrainStep(seed=3, step=18))
    else:
        nn.init.zeros_(blocks[0].norm1.weight)
    match = "modified by an inplace" if change == "weights" else "model changed after the forward"
    with pytest.raises(RuntimeError, match=match):
        loss.backward()
