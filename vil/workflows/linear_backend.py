"""Select the backends that compute the linear layers and MLPs of a config's model on a CPU.

`vil.ops.linear` and `vil.ops.mlp` implement the backends. The selected backends are stored together
with those of attention.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from yacs.config import CfgNode

from vil.engine.build import amp_dtype
from vil.layers.block import Block, mlp_weights
from vil.layers.fused_attention import can_fuse
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
    network: nn.Module,
    cfg: CfgNode,
    device: torch.device,
    *,
    training: bool = True,
    padded: bool = False,
    world: int = 1,
) -> list[LinearRequest]:
    """Return the calls of linear layers and MLPs that an MsViT makes on a CPU.

    Calls in evaluation are always included. training: include the calls in training. padded:
    whether the images have padding. world: number of processes that share a batch of DATALOADER.BSZ
    images.
    Returns [] for other networks and devices, and with MODEL.COMPILE, where torch.compile computes
    them.
    """
    if not isinstance(network, MsViT) or device.type != "cpu" or cfg.MODEL.COMPILE:
        return []
    batch = max(1, cfg.DATALOADER.BSZ // world)
    dtype = amp_dtype(cfg.AMP.DTYPE, enabled=cfg.AMP.ENABLED) or torch.float32
    found = {}
    grids = network.grids((cfg.INPUT.IMAGE_SIZE,) * 2)
    for number, (stage, grid) in enumerate(zip(network.stages, grids), start=1):
        for block in stage.blocks:
            tokens = batch * (block.attn.num_global + grid[0] * grid[1])
            for needs_grad in (True, False) if training else (False,):
                branches = stage.reversible or (
                    needs_grad and not isinstance(block.drop_path, nn.Identity)
                )
                own = dict(training=needs_grad, branches=branches, padded=padded)
                for kind, dim, features in _operations(block, **own):
                    case = LinearCase(kind, tokens, dim, features, dtype, device.type, needs_grad)
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
