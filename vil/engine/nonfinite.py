"""Skip the update on all ranks if any rank has a non-finite loss or gradient.

The flag stays on the device, where the update is made conditional on it (`update`). The host reads
it one step later, so that it never waits for an accelerator. A skipped step leaves weights,
optimizer state and averages unchanged; data and schedule advance.
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

MAX_LISTED = 20  # parameters in a dump, those with the largest gradients first


class Flags(NamedTuple):
    """Flags of a step, reduced over the ranks."""

    bad: bool = False  # loss or gradient is not finite
    signal: int = 0  # number of a received signal, 0: none


def gradient_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Return the norm of all gradients together. Clip them to `max_norm`, unless it is 0."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm([p.grad for p in parameters]))
    if max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def all_reduce_flags(loss: Tensor, norm: Tensor, signal: int) -> Tensor:
    """Return float32 (2,), the same on every rank: 1 if any rank's loss or gradient norm is not
    finite, and the signal that any rank received."""
    good = (loss.isfinite() & norm.isfinite()).float()
    flags = torch.stack([1 - good, torch.full_like(good, signal)])
    if torch_dist.is_initialized():
        torch_dist.all_reduce(flags, torch_dist.ReduceOp.MAX)
    return flags


class BatchNormSnapshot:
    """The running statistics of batch norms, which a forward pass changes, to undo a bad step."""

    def __init__(self, model: nn.Module):
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    def keep(self) -> None:
        """Copy the statistics before the forward pass."""
        self.copies = [buffer.clone() for buffer in self.buffers]

    def restore(self, bad: Tensor) -> None:
        """Restore them after it if `bad` is 1."""
        for buffer, copy in zip(self.buffers, self.copies):
            buffer.copy_(torch.where(bad > 0, copy, buffer))


def update(optimizer: Optimizer, bad: Tensor) -> None:
    """Step the optimizer unless `bad`, a float32 scalar, is 1. torch's fused optimizers read it on
    the device; for others the host waits for it."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, bad
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
    elif not bad.item():
        optimizer.step()


class DelayedFlags:
    """Read flags without waiting for a GPU: those of the previous step. On a CPU at once."""

    def __init__(self, device: torch.device):
        self.is_delayed = device.type == "cuda"
        self.copied: tuple[Tensor, Any] | None = None

    def read(self, flags: Tensor) -> Flags:
        if self.is_delayed:
            previous, host, done = self.copied, torch.empty(2, pin_memory=True), torch.cuda.Event()
            host.copy_(flags, non_blocking=True)
            done.record()
            self.copied = host, done
            if previous is None:
                return Flags()
            flags, done = previous
            done.synchronize()
        bad, signal = flags.tolist()
        return Flags(bool(bad), int(signal))


class NonFiniteSteps:
    """Count consecutive skipped steps; raise DivergedError after more than `limit`."""

    def __init__(self, limit: int, folder: Path, rank: int):
        self.limit, self.file = limit, folder / "crash" / f"not-finite-rank{rank}.json"
        self.in_a_row = 0

    def count(self, flags: Flags, model: nn.Module, **record: Any) -> int:
        """Return 1 for a skipped step. Write crash/ before raising DivergedError."""
        self.in_a_row = self.in_a_row + 1 if flags.bad else 0
        if self.in_a_row > self.limit:
            dump(self.file, model, record | {"samples": record["samples"].tolist()})
            raise DivergedError(
                f"loss or gradient not finite in {self.in_a_row} steps in a row, up to step "
                f"{record['step']}; see {self.file}"
            )
        return int(flags.bad)


def dump(file: Path, model: nn.Module, record: dict[str, Any]) -> None:
    """Write `record` and the parameters with the largest gradients, to find where NaNs began."""
    file.parent.mkdir(exist_ok=True)
    sizes = {
        name: {"weight": max_abs(p), "gradient": None if p.grad is None else max_abs(p.grad)}
        for name, p in model.named_parameters()
    }
    worst = sorted(sizes, key=lambda name: sort_key(sizes[name]["gradient"]), reverse=True)
    values = {name: value() if callable(value) else value for name, value in record.items()}
    values["largest"] = {name: sizes[name] for name in worst[:MAX_LISTED]}
    file.write_text(json.dumps(values, indent=1, default=str) + "\n")


def max_abs(x: Tensor) -> float:
    x = local(x.detach())
    return x.abs().max().item() if x.numel() else 0.0


def sort_key(value: float | None) -> float:
    """Sort None last and NaN first, in descending order."""
    return -1.0 if value is None else math.inf if math.isnan(value) else value
