"""Prepare a model's weights for a safetensors file, and load them from one.

Weights are saved only if all are finite, and loaded only if all names and shapes match.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vil.engine.distributed import all_reduce_sum
from vil.engine.fsdp import full_tensor, local, shard_like
from vil.utils.errors import CheckpointError, DivergedError

MAX_KEYS_LISTED = 12


def check_finite(model: nn.Module, step: int) -> None:
    """Raise DivergedError on all ranks if any weight is NaN or infinite."""
    bad = torch.stack([(~local(p).isfinite()).any() for p in model.parameters()]).sum()
    if all_reduce_sum(bad).item():
        raise DivergedError(
            f"weights at step {step} are not finite: no checkpoint was written; lower OPTIM.LR, "
            "and resume from an earlier checkpoint"
        )


def full_state_dict(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return the model's state dict, with unsharded copies of all tensors on the CPU.

    If the model is sharded, all ranks must call this function, because it gathers the shards. keep:
    whether this rank needs the result. If False, an empty dict is returned.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensor = full_tensor(tensor.detach())
        if keep:  # copy, because safetensors rejects tensors that share memory
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    return tensors


def load_exactly(model: nn.Module, file: Path) -> None:
    """Load a safetensors file into the model. Raises CheckpointError if the name or shape of any
    tensor differs."""
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    current = model.state_dict()
    problems = find_differences(current, tensors)
    if problems:
        more = len(problems) - MAX_KEYS_LISTED
        listed = problems[:MAX_KEYS_LISTED] + ([f"and {more} more"] if more > 0 else [])
        raise CheckpointError(
            f"{file} is from another model: restore that model's config, or start a new run with "
            f"MODEL.MODEL_PATH set to this file. Differences: {'; '.join(listed)}"
        )
    model.load_state_dict({name: shard_like(t, current[name]) for name, t in tensors.items()})


def find_differences(model: dict[str, Tensor], file: dict[str, Tensor]) -> list[str]:
    """Compare the state dicts of a model and of a file. Returns a line of text for each key that
    only one of them has, and for each key whose tensors have different shapes."""
    missing = [f"missing {n} {tuple(model[n].shape)}" for n in model if n not in file]
    unexpected = [f"unexpected {n} {tuple(file[n].shape)}" for n in file if n not in model]
    resized = [
        f"resized {n}: {tuple(file[n].shape)} in the file, {tuple(model[n].shape)} in the model"
        for n in model
        if n in file and file[n].shape != model[n].shape
    ]
    return missing + unexpected + resized
