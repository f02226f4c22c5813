"""Shard weights over the ranks (FSDP2), and gather them for a checkpoint.

Each rank stores a shard of every parameter, gradient and optimizer state. A checkpoint has full
tensors under the plain model's names, so a run can resume with another strategy (such as DDP) or
number of ranks.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from vil.engine.distributed import DistInfo


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    dist: DistInfo,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
) -> None:
    """Shard a model in place over all ranks, which must have the same weights.

    blocks: submodules whose weights are gathered one at a time. The other weights of the model are
    gathered together. amp_dtype: the dtype of autocast, in which weights are then gathered and used
    too. Shards, gradients and optimizer states stay in float32.
    """
    mesh = init_device_mesh(device.type, (dist.world,))
    policy = MixedPrecisionPolicy(
        param_dtype=amp_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def is_sharded(model: nn.Module) -> TypeGuard[FSDPModule]:
    return isinstance(model, FSDPModule)


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor. A tensor that is not sharded is returned unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensor(x: Tensor) -> Tensor:
    """Gather a sharded tensor, and return the full tensor on every rank. All ranks must call this.
    A tensor that is not sharded is returned unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard_like(x: Tensor, other: Tensor) -> Tensor:
    """Shard a tensor in the same way as `other`. Returns `x` unchanged if `other` is not sharded or
    has another shape. x: a full tensor with the same values on all ranks."""
    if not isinstance(other, DTensor) or x.shape != other.shape:
        return x
    return distribute_tensor(x.to(other.device), other.device_mesh, other.placements)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Inside the context, every rank has the full weights of a sharded model.

    Ranks may then run different numbers of forward passes, for example in an evaluation.
    """
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
