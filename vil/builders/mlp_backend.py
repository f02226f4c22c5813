"""Select the backends that compute the MLPs of a config's model on a CPU.

`vil.ops.mlp` implements the backends. The selected backends are stored together with those of
attention.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from yacs.config import CfgNode

from vil.builders.device import amp_dtype
from vil.layers.block import mlp_weights
from vil.models.vision_longformer import MsViT
from vil.ops.dispatch import CHOICES
from vil.ops.mlp import MlpCase, choose_mlp
from vil.ops.tuning import tuner, tuning_cache
from vil.ops.tuning.mlp_tuner import tune_mlp


class MlpRequest(NamedTuple):
    """A call of `vil.ops.mlp.norm_mlp` that a stage of the model makes. stage: its number, from 1.
    case: the properties of the call, such as shapes and dtype."""

    stage: int
    case: MlpCase

    def __str__(self) -> str:
        phase = "training" if self.case.needs_grad else "evaluation"
        sizes = f"{self.case.tokens} tokens, {self.case.dim} to {self.case.hidden} channels"
        return f"stage {self.stage}: MLP of {sizes}, {phase}"


def mlp_requests(
    network: nn.Module, cfg: CfgNode, device: torch.device, *, training: bool = True, world: int = 1
) -> list[MlpRequest]:
    """List the calls of `norm_mlp` that a network makes in evaluation and, if `training`, in
    training.

    The list is empty if the network is not an MsViT, or if the device is not a CPU.
    world: number of processes, which share a batch of DATALOADER.BSZ images.
    """
    if not isinstance(network, MsViT) or device.type != "cpu":
        return []
    batch = max(1, cfg.DATALOADER.BSZ // world)
    dtype = amp_dtype(cfg) or torch.float32
    found = {}
    grids = network.grids((cfg.INPUT.IMAGE_SIZE,) * 2)
    for number, (stage, grid) in enumerate(zip(network.stages, grids), start=1):
        for block in stage.blocks:
            tokens = batch * (block.attn.num_global + grid[0] * grid[1])
            if weights := mlp_weights(block.norm2, block.mlp):
                hidden, dim = weights.weight1.shape
                for needs_grad in (True, False) if training else (False,):
                    case = MlpCase(tokens, dim, hidden, dtype, device.type, needs_grad)
                    found[MlpRequest(number, case)] = None
    return list(found)


def tune_missing_mlps(requests: list[MlpRequest], say: Callable[[str], None]) -> None:
    """Time both backends, PyTorch's and the compiled one (`native`), for each call that `native`
    supports and that has no entry in CHOICES. Store the faster backend in CHOICES and in this
    user's tuning cache. say: function that logs a line."""
    found = {}
    for request in requests:
        bucket = request.case.bucket()
        if bucket not in CHOICES and not request.case.unsupported():
            say(f"{request}: timing the backends")
            found[bucket] = trials = tune_mlp(request.case)
            for line in tuner.listing(trials):
                say(line)
    if found:
        tuning_cache.save("cpu", found)


def compiled_mlps(requests: list[MlpRequest]) -> list[str]:
    """Return a log line for each call that the compiled backend computes."""
    return [f"{each}: native, tuned" for each in requests if choose_mlp(each.case) == "native"]
