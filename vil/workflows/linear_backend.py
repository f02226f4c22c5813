"""Select the backends that compute the linear layers and MLPs of a model on a CPU.

`vil.ops.linear` and `vil.ops.mlp` implement the backends. The selected backends are stored together
with those of attention.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from vil.layers.block import Block
from vil.layers.fused_attention import can_fuse
from vil.layers.fused_mlp import mlp_weights
from vil.layers.linear import is_plain
from vil.models.vision_longformer import MsViT
from vil.ops.linear_case import (
    LINEAR,
    LINEAR_RESIDUAL,
    MLP,
    NAMES,
    NORM_LINEAR,
    LinearCase,
    choose,
)
from vil.workflows.execution import Execution


class LinearRequest(NamedTuple):
    """A call of `vil.ops.linear.linear` or `vil.ops.mlp.norm_mlp` that a stage of the model makes.

    stage: number of the stage, from 1. case: properties of the call, such as shapes and dtype.
    """

    stage: int
    case: LinearCase

    def __str__(self) -> str:
        case = self.case
        sizes = f"{case.tokens} tokens, {case.dim} to {case.features} channels"
        return f"stage {self.stage}: {NAMES[case.kind]} of {sizes}, {case.phase}"


def linear_requests(
    network: nn.Module, execution: Execution, *, training: bool = True, padded: bool = False
) -> list[LinearRequest]:
    """Return the calls of linear layers and MLPs that an MsViT makes on a CPU.

    Calls in evaluation are always included. training: include the calls in training. padded:
    whether the images have padding.
    Returns [] for other networks and devices, and for a compiled model, where torch.compile
    computes them.
    """
    on_cpu = execution.device.type == "cpu"
    if not isinstance(network, MsViT) or not on_cpu or execution.compile_mode is not None:
        return []
    found = {}
    grids = network.grids((execution.image_size,) * 2)
    for number, (stage, grid) in enumerate(zip(network.stages, grids), start=1):
        for block in stage.blocks:
            tokens = execution.batch_size * (block.attn.num_global + grid[0] * grid[1])
            for needs_grad in (True, False) if training else (False,):
                branches = stage.reversible or (
                    needs_grad and not isinstance(block.drop_path, nn.Identity)
                )
                own = dict(training=needs_grad, branches=branches, padded=padded)
                for kind, dim, features in _operations(block, **own):
                    sizes = tokens, dim, features
                    case = LinearCase(kind, *sizes, execution.dtype, "cpu", needs_grad)
                    found[LinearRequest(number, case)] = None
    return list(found)


def _operations(
    block: Block, *, training: bool, branches: bool, padded: bool
) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, dim, features) for each linear layer of a block's attention, and for its MLP.

    Modules that the compiled code does not support are skipped, such as those with dropout in
    training. kind, dim, features: see `LinearCase`. branches: whether the block adds its residuals
    in separate operations, as in training with stochastic depth. padded: whether the images have
    padding.
    """
    dim = block.attn.dim
    if not padded and can_fuse(block.norm1, block.attn, training):
        yield NORM_LINEAR, dim, 3 * dim
        yield LINEAR if branches else LINEAR_RESIDUAL, dim, dim
    else:
        for layer in filter(is_plain, block.attn.children()):
            yield LINEAR, layer.in_features, layer.out_features
    if weights := mlp_weights(block.norm2, block.mlp, training):
        yield MLP, *weights.weight1.shape[::-1]


def describe_linears(requests: list[LinearRequest]) -> list[str]:
    """Return a line on the linear layers and MLPs that the compiled backend computes in training
    and in evaluation, or no line if it computes none."""
    counts = []
    for phase in dict.fromkeys(request.case.phase for request in requests):
        asked = [request for request in requests if request.case.phase == phase]
        if native := sum(choose(request.case) == "native" for request in asked):
            counts.append(f"{native} of {len(asked)} in {phase}")
    return [f"linear layers and MLPs: native for {', '.join(counts)}"] if counts else []
