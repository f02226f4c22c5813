"""Reversible residual blocks: the backward pass recomputes activations from the outputs.

Two streams, x1 and x2, both start as the input. Each block updates them in turn:

    y1 = x1 + attn_branch(x2)
    y2 = x2 + mlp_branch(y1)

Only y1 and y2 of the last block are stored. The backward pass recomputes the branches to get the
inputs of each block. So the memory does not grow with the number of blocks, at the cost of one more
forward pass. The output is the mean of the streams.

Sources: RevNet, arXiv:1707.04585, section 3; Reversible Vision Transformers, arXiv:2302.04869,
section 3. As in the second paper's Rev-MViT, the streams are averaged before each stage transition,
and here also after the last stage.

Shapes: B batch, T tokens (global and local), C channels, n blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call

from vil.layers.block import Block
from vil.layers.padding import Grid, Valid
from vil.utils.precision import has_autocast
from vil.utils.transforms import is_exporting, is_transformed

Autocast = Callable[[], AbstractContextManager]  # returns an autocast context

NO_SECOND = (
    "reversible blocks have no second derivative, and no backward pass inside a torch.func "
    "transform: run the forward pass in a block `with vil.models.stage.store_activations(model):`"
)
CHANGED = (
    "reversible blocks recompute their activations, but the model changed after the forward pass: "
    "call train(), eval() and set_progress() only after backward()"
)


def run_reversible(
    blocks: Sequence[Block], x: Tensor, grid: Grid, valid_hw: Valid = None, *, recompute: bool
) -> Tensor:
    """Apply blocks to x (B, T, C) in two residual streams. Returns their mean (B, T, C).

    recompute: recompute activations in the backward pass instead of storing them. This is ignored
    in an export, under torch.func transforms, and if no gradients are needed.
    """
    if not len(blocks):
        return x
    # in bfloat16, recomputed inputs would lose most of their digits
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    parameters = [p for block in blocks for p in block.parameters() if p.requires_grad]
    call = Call(blocks, grid, valid_hw)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or len(parameters) > 0)
    if recompute and needs_grad and not is_exporting() and not is_transformed(x, *parameters):
        streams = _recompute(call, wide)
    else:
        streams = [wide, wide]
        for step in range(call.num_steps):
            call.advance(streams, step)
    return ((streams[0] + streams[1]) / 2).to(x.dtype)


@dataclass(frozen=True)
class Call:
    """A forward pass of n reversible blocks as 2n steps. Each step updates one of two streams.

    Step 2i runs the attention branch of block i, and step 2i + 1 its MLP branch. grid, valid_hw:
    arguments of each block's attention.
    """

    blocks: Sequence[Block]
    grid: Grid
    valid_hw: Valid

    @property
    def num_steps(self) -> int:
        return 2 * len(self.blocks)

    def advance(self, streams: list[Tensor], step: int) -> None:
        """Run a step: add the output of a branch for one stream to the other stream.

        streams: two tensors (B, T, C), one of which is replaced. An even step adds
        attn_branch(streams[1]) to streams[0], and an odd step adds mlp_branch(streams[0]) to
        streams[1].
        """
        block, changed = self.blocks[step // 2], step % 2
        streams[changed] = streams[changed] + self.branch(block, step, streams[1 - changed])

    def branch(self, block: nn.Module, step: int, x: Tensor) -> Tensor:
        """Apply the block's attention branch (even steps) or MLP branch (odd steps) to x."""
        x = x.to(block.norm1.weight.dtype)  # may be bfloat16, unlike the streams
        return block.mlp_branch(x) if step % 2 else block.attn_branch(x, self.grid, self.valid_hw)


# torch.compile cannot trace the states of random generators, so it skips this function
@torch.compiler.disable
def _recompute(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    trainable = [
        {name: p for name, p in block.named_parameters() if p.requires_grad}
        for block in call.blocks
    ]
    names = [list(block) for block in trainable]
    parameters = chain.from_iterable(block.values() for block in trainable)
    return ReversibleFunction.apply(call, names, x, *parameters)


class ReversibleFunction(torch.autograd.Function):
    """Forward pass of reversible blocks, with a backward pass that recomputes the activations.

    The parameters are inputs of the function, so `backward` returns their gradients to autograd.
    DDP, FSDP and hooks of tensors see each gradient once, as they do without recomputation.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, call: Call, names: list[list[str]], x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Return both streams after all blocks, each (B, T, C) like x.

        call: the blocks and their arguments.
        names: for each block, the names of its trainable parameters.
        parameters: these parameters, block by block.
        """
        ctx.call, ctx.names, ctx.device, ctx.states = call, names, x.device, []
        ctx.autocast = _current_autocast(x.device)
        ctx.sampling_state = _list_sampling_state(call.blocks)
        streams = [x, x]
        with ctx.autocast():
            for step in range(call.num_steps):
                ctx.states.append(get_rng_states(x.device))
                call.advance(streams, step)
        ctx.save_for_backward(*streams, *parameters)
        return tuple(streams)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple:
        if torch.is_grad_enabled() or is_transformed(*grads):
            raise RuntimeError(NO_SECOND)
        if _list_sampling_state(ctx.call.blocks) != ctx.sampling_state:
            raise RuntimeError(CHANGED)
        first, second, *parameters = ctx.saved_tensors
        streams, grads, left = [first, second], list(grads), iter(parameters)
        blocks = [
            RecomputedBlock(ctx.call, block, dict(zip(names, left)))
            for block, names in zip(ctx.call.blocks, ctx.names)
        ]
        with restored_rng(ctx.device):
            for step in reversed(range(ctx.call.num_steps)):
                set_rng_states(ctx.device, ctx.states[step])
                blocks[step // 2].undo(streams, grads, step, ctx.autocast)
        to_parameters = (grad for block in blocks for grad in block.grads)
        return None, None, grads[0] + grads[1], *to_parameters


class RecomputedBlock(nn.Module):
    """A reversible block in the backward pass. It recomputes activations and collects gradients.

    parameters: {name: parameter}, the block's trainable parameters as saved by the forward pass.
    The attribute `grads` lists their gradients in the same order, None for unused parameters.
    """

    def __init__(self, call: Call, block: Block, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.call, self.block = call, block
        # copies: a hook of a parameter must not run for the inner gradients
        self.used = {f"block.{name}": p.detach().requires_grad_() for name, p in parameters.items()}
        self.grads: list[Tensor | None] = [None] * len(parameters)

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Return the output of the attention branch (even step) or MLP branch (odd step) for x."""
        return self.call.branch(self.block, step, x)

    def undo(
        self, streams: list[Tensor], grads: list[Tensor], step: int, autocast: Autocast
    ) -> None:
        """Undo a step: change `streams` and their gradients `grads` in place to their values before
        the step. Also add the gradients of the block's parameters to `self.grads`.

        step: even for the attention branch of the block, odd for its MLP branch.
        autocast: function that returns the autocast context of the forward pass.
        """
        changed, other = step % 2, 1 - step % 2
        x = streams[other].detach().requires_grad_()
        with torch.enable_grad(), autocast():
            branch = functional_call(self, self.used, (step, x))
        streams[changed] = streams[changed] - branch.detach()
        inputs, grad = (x, *self.used.values()), grads[changed].to(branch.dtype)
        to_x, *found = torch.autograd.grad(branch, inputs, grad, allow_unused=True)
        if to_x is not None:
            grads[other] = grads[other] + to_x
        self.grads = [_add(total, grad) for total, grad in zip(self.grads, found)]


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    return grad if total is None else total if grad is None else total + grad


def _current_autocast(device: torch.device) -> Autocast:
    """Return a function that creates a context with a device's current autocast settings.

    The context does not cache cast weights: a weight that was cast without gradients must not be
    reused where gradients are computed.
    """
    kind = device.type
    if not has_autocast(kind):
        return nullcontext
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=False)


def _list_sampling_state(blocks: Sequence[Block]) -> list[tuple[Any, ...]]:
    """Return, for each module in the blocks, the attributes that determine its random samples.

    If they changed between the forward and the backward pass, the recomputed activations would
    differ. The states of torch's generators are not included, because they are restored.
    """
    names = ("training", "progress", "last_redraw")  # random shift; performer
    modules = (module for block in blocks for module in block.modules())
    return [tuple(getattr(module, name, None) for name in names) for module in modules]


def _generators(device: torch.device) -> list[tuple[Any, tuple]]:
    """Return a pair (module, arguments) for the random generator of the CPU and, if the device has
    its own, another pair for that one. Example of a pair: (torch.cuda, (device,)).

    `module.get_rng_state(*arguments)` returns the state of the generator.
    """
    if device.type in ("cpu", "meta"):
        return [(torch, ())]
    where = () if device.type == "mps" else (device,)
    return [(torch, ()), (torch.get_device_module(device), where)]


def get_rng_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators of the CPU and of a device."""
    return [module.get_rng_state(*where) for module, where in _generators(device)]


def set_rng_states(device: torch.device, states: list[Tensor]) -> None:
    """Set the states of torch's generators to those that `get_rng_states` returned."""
    for (module, where), state in zip(_generators(device), states):
        module.set_rng_state(state, *where)


@contextmanager
def restored_rng(device: torch.device) -> Iterator[None]:
    """Context manager that restores the states of torch's generators at exit.

    device: the device whose generator is restored, in addition to the CPU's.
    """
    states = get_rng_states(device)
    try:
        yield
    finally:
        set_rng_states(device, states)
