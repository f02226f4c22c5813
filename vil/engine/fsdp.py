"""Weights spread over the ranks (FSDP2), and whole again for a checkpoint.

Each rank keeps a slice of every parameter, gradient and momentum, and has a block's weights whole
for as long as it computes with them. A checkpoint is that of one process, whole tensors under the
plain model's names, so that the strategy and the number of ranks may change from start to start.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from vil.engine.distributed import DistInfo


def shard(
    model: nn.Module, blocks: Iterable[nn.Module], dist: DistInfo, device: torch.device
) -> None:
    """Spread a model in place: each of `blocks` is gathered alone, the rest together. Every rank
    must hold the same weights."""
    mesh = init_device_mesh(device.type, (dist.world,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def local(x: Tensor) -> Tensor:
    """This rank's slice; all of a tensor that is not spread."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensor(x: Tensor) -> Tensor:
    """All of a tensor. Every rank must ask for it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard_like(x: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, spread as another one of its shape is."""
    if not isinstance(other, DTensor) or x.shape != other.shape:
        return x
    return distribute_tensor(x.to(other.device), other.device_mesh, other.placements)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Inside, every rank has all weights and forwards as often as it likes: in an evaluation the
    ranks need not have as many batches."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)
