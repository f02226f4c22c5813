"""Whether a step counts: its gradients are finite on every rank, or none of them moves anything.

The decision is a number on the device, the largest of the ranks', and the update is made
conditional on it there (`update`); the host reads it a step later, so that an accelerator never
waits. A step that does not count leaves weights, momenta and averages as they are; data and
schedule go on.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.optim import Optimizer

from vil.engine.fsdp import full_tensor, local
from vil.utils.errors import DivergedError

LISTED = 20  # parameters in a dump, those with the largest gradients first


class Flags(NamedTuple):
    """What all ranks know of a step: whether it was bad, and the signal that came to one."""

    bad: bool
    signal: int


NOTHING = Flags(False, 0)


def gradient_norm(model: nn.Module, most: float) -> Tensor:
    """The norm of all gradients together; above `most` they are scaled down to it, 0: never."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm([p.grad for p in parameters]))
    if most:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


def all_reduce_flags(loss: Tensor, norm: Tensor, signal: int) -> Tensor:
    """float32 (2,), the same on every rank: 1 if loss or gradient of any is not finite, and the
    signal that one of them noted."""
    good = (loss.isfinite() & norm.isfinite()).float()
    flags = torch.stack([1 - good, torch.full_like(good, signal)])
    if torch_dist.is_initialized():
        torch_dist.all_reduce(flags, torch_dist.ReduceOp.MAX)
    return flags


class BatchNormSnapshot:
    """What a forward pass itself moves, the averages in batch norms: put back after a step that did
    not count."""

    def __init__(self, model: nn.Module):
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.moving = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    def keep(self) -> None:
        """Before the forward pass."""
        self.kept = [buffer.clone() for buffer in self.moving]

    def restore(self, bad: Tensor) -> None:
        """After it, if `bad` is 1."""
        for buffer, kept in zip(self.moving, self.kept):
            buffer.copy_(torch.where(bad > 0, kept, buffer))


def update(optimizer: Optimizer, bad: Tensor) -> None:
    """A step, unless `bad` (float32, no dimension) is 1. torch's fused optimizers look at it on the
    device; for the others the host waits for it."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, bad
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
    elif not bad.item():
        optimizer.step()


class DelayedFlags:
    """Reads flags without waiting for the device: those of the step before. On a CPU at once."""

    def __init__(self, device: torch.device):
        self.ahead = device.type == "cuda"
        self.copied: tuple[Tensor, Any] | None = None

    def read(self, flags: Tensor) -> Flags:
        """Those of this step on a CPU, of the one before on a GPU."""
        if not self.ahead:
            return as_flags(flags)
        before = self.last()
        host, done = torch.empty(2, pin_memory=True), torch.cuda.Event()
        host.copy_(flags, non_blocking=True)
        done.record()
        self.copied = host, done
        return before

    def last(self) -> Flags:
        """Those that are still to be read."""
        if self.copied is None:
            return NOTHING
        (host, done), self.copied = self.copied, None
        done.synchronize()
        return as_flags(host)


def as_flags(flags: Tensor) -> Flags:
    bad, signal = flags.tolist()
    return Flags(bool(bad), int(signal))


class NonFiniteSteps:
    """Counts steps that did not count; DivergedError when too many of them follow each other."""

    def __init__(self, limit: int, folder: Path, rank: int):
        self.limit, self.folder, self.rank, self.in_a_row = limit, folder, rank, 0

    def count(self, flags: Flags, model: nn.Module, **facts: Any) -> int:
        """1 if the step was bad; with one too many, `facts` and the state of the model are written
        to crash/ first."""
        self.in_a_row = self.in_a_row + 1 if flags.bad else 0
        if self.in_a_row > self.limit:
            file = self.folder / "crash" / f"not-finite-rank{self.rank}.json"
            dump(file, model, facts | {"samples": facts["samples"].tolist()})
            raise DivergedError(
                f"loss or gradient were not finite in {self.in_a_row} steps in a row, up to step "
                f"{facts['step']}; see {file}"
            )
        return int(flags.bad)


def dump(file: Path, model: nn.Module, facts: dict[str, Any]) -> None:
    """What may tell where it began: `facts`, and the largest weights and gradients."""
    file.parent.mkdir(exist_ok=True)
    sizes = {
        name: {"weight": largest_of(p), "gradient": None if p.grad is None else largest_of(p.grad)}
        for name, p in model.named_parameters()
    }
    worst = sorted(sizes, key=lambda name: rank_of(sizes[name]["gradient"]), reverse=True)
    facts = {name: fact() if callable(fact) else fact for name, fact in facts.items()}
    found = {**facts, "largest": {name: sizes[name] for name in worst[:LISTED]}}
    file.write_text(json.dumps(found, indent=1, default=str) + "\n")


def largest_of(x: Tensor) -> float:
    x = local(x.detach())
    return x.abs().max().item() if x.numel() else 0.0


def rank_of(value: float | None) -> float:
    """NaN first of all."""
    return -1.0 if value is None else math.inf if math.isnan(value) else value
