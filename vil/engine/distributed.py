"""The rank of this process, and the collectives that the engine uses.

torchrun sets environment variables for each process. Without them there is a single process and no
process group, and each collective returns its input.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"  # set by srun, not in the batch script
GLOO_GRACE_SECONDS = 0.5


@dataclass(frozen=True)
class DistInfo:
    """The rank of this process among all `world` processes, and its `local_rank` among the
    processes on its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    @property
    def local_ranks(self) -> int:
        """The number of processes of this run on this machine."""
        return max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1) if self.world > 1 else 1


def read_environment(environment: Mapping[str, str]) -> DistInfo:
    """Read the ranks from torchrun's environment variables; without these, there is one process.
    Raises ValueError if the variables are incomplete or invalid."""
    if not any(name in environment for name in RANK_VARIABLES):
        if (tasks := environment.get(SLURM_TASKS, "1")) != "1":
            raise ValueError(
                f"srun started {tasks} processes without a process group: let srun start one "
                "torchrun on each node (scripts/train_slurm.sh)"
            )
        return DistInfo()
    missing = [name for name in RANK_VARIABLES + MASTER_VARIABLES if name not in environment]
    if missing:
        raise ValueError(
            f"torchrun's environment is incomplete: {', '.join(missing)} not set "
            f"(start with torchrun, or unset {', '.join(RANK_VARIABLES)} to run a single process)"
        )
    values = {name: environment[name] for name in RANK_VARIABLES}
    if not all(value.isdecimal() for value in values.values()):
        raise ValueError(f"torchrun's environment variables must be integers, got {values}")
    rank, world, local_rank = map(int, values.values())
    if rank >= world:
        raise ValueError(f"RANK {rank} must be below WORLD_SIZE {world}")
    return DistInfo(rank, world, local_rank)


def start(backend: str, device: torch.device) -> DistInfo:
    """Read the rank of this process, select its GPU, and initialize the process group if there are
    several processes.

    backend: "nccl", "gloo" or "mpi"; ignored unless `device` is a GPU, because CPUs use gloo.
    Raises ValueError if the ranks are invalid, if there is no GPU for this process, or if `device`
    (such as cuda:0) names one GPU for several processes.
    """
    dist = read_environment(os.environ)
    local_world = max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), dist.local_rank + 1)
    if device.index is not None and min(dist.world, local_world) > 1:
        raise ValueError(
            f"DEVICE {device} would put all {local_world} processes of this machine on one GPU: "
            "set DEVICE to cuda, which selects a GPU for each process"
        )
    if device.type == "cuda":
        if dist.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK {dist.local_rank} has no GPU ({torch.cuda.device_count()} visible): "
                "start at most one process per GPU (--nproc_per_node)"
            )
        torch.cuda.set_device(dist.local_rank if device.index is None else device.index)
    if dist.world > 1:
        if device.type != "cuda":
            backend = "gloo"
        elif backend == "nccl":  # gloo for CPU tensors: these collectives do not wait for the GPU
            backend = "cpu:gloo,cuda:nccl"
        # known GPUs let NCCL connect now, instead of at the first collective
        gpu = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
        torch_dist.init_process_group(backend, rank=dist.rank, world_size=dist.world, device_id=gpu)
    return dist


def current() -> DistInfo:
    """Return the rank of this process in the process group that a script initialized."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    return DistInfo(torch_dist.get_rank(), torch_dist.get_world_size(), local_rank)


def stop() -> None:
    """Destroy the process group, if there is one. Call this last, even after an error."""
    if not torch_dist.is_initialized():
        return
    if "gloo" in torch_dist.get_backend():
        # gloo's threads outlive the group, because DDP holds a reference to it. If such a thread
        # frees the tensor of the last collective during Python's shutdown, the process aborts
        # (measured: 1 run of 15 with torch 2.11 on two busy cores). Sleeping gives the threads the
        # GIL, so that they free it before.
        time.sleep(GLOO_GRACE_SECONDS)
    torch_dist.destroy_process_group()


def wrap(model: nn.Module, dist: DistInfo, device: torch.device) -> nn.Module:
    """Wrap the model in DDP if there are several ranks and the model is not sharded.

    On GPUs, batch norms are converted to SyncBatchNorm. On CPUs, their running statistics differ
    between ranks until `share_buffers` is called.
    """
    if dist.world == 1 or hasattr(model, "set_requires_gradient_sync"):
        return model
    devices = None
    if device.type == "cuda":
        devices = [torch.cuda.current_device()]
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # no broadcast of buffers in each step: those of ViL models are equal on all ranks
    return DistributedDataParallel(
        model, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True
    )


def share_buffers(model: nn.Module) -> None:
    """Broadcast the buffers of rank 0's model to all ranks.

    All ranks then evaluate with the batch norm statistics that rank 0 saves.
    """
    if torch_dist.is_initialized():
        for buffer in model.buffers():
            torch_dist.broadcast(buffer, src=0)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain model inside the wrappers of DDP and torch.compile, which add prefixes to
    parameter names."""
    for name in ("module", "_orig_mod"):
        if isinstance(inner := getattr(model, name, None), nn.Module):
            return unwrap(inner)
    return model


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it."""
    if torch_dist.is_initialized():
        torch_dist.all_reduce(tensor)
    return tensor


def all_reduce_max(number: int) -> int:
    """Return the maximum of a number over all ranks. Uses a tensor on the CPU, so that the host
    does not wait for the accelerator."""
    if not torch_dist.is_initialized():
        return number
    box = torch.tensor(number)
    torch_dist.all_reduce(box, torch_dist.ReduceOp.MAX)
    return int(box)


def broadcast_object(value: T) -> T:
    """Return rank 0's `value` on every rank."""
    if not torch_dist.is_initialized():
        return value
    box = [value]
    torch_dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks as a list in rank order on rank 0, and an empty list on other
    ranks."""
    if not torch_dist.is_initialized():
        return [value]
    main = torch_dist.get_rank() == 0
    box: list[Any] | None = [None] * torch_dist.get_world_size() if main else None
    torch_dist.gather_object(value, box, dst=0)
    return box or []


def compute_on_main(function: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every rank.

    If the function raises an exception on rank 0, the other ranks raise RuntimeError, so that they
    do not wait for the result forever.
    """
    result, error = cast(T, None), None
    if not torch_dist.is_initialized() or torch_dist.get_rank() == 0:
        try:
            result = function()
        except Exception as caught:
            error = caught
    result, reason = broadcast_object((result, error and f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    if reason:
        raise RuntimeError(f"rank 0 failed: {reason}")
    return result
