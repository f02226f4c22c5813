"""Skip the update on all ranks if any rank has a non-finite loss or gradient.

A skipped step leaves weights, optimizer state and averages unchanged, but data and schedule
advance. A flag on the device marks such a step. torch's fused optimizers read the flag on the
device. For other optimizers, the host waits for the flag at each step.
"""

import json
import math
from collections.abc import Mapping
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
    """Flags of a training step, reduced over all ranks: whether a loss or gradient is not finite,
    and which signal (such as SIGTERM) was received."""

    bad: bool = False  # loss or gradient is not finite
    signal: int = 0  # number of a received signal, 0: none
    record: Mapping[str, Any] = {}  # values that describe the step


def gradient_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Return the norm of all gradients together, before clipping. If `max_norm` is not 0, clip the
    gradients, so that their norm becomes at most `max_norm`."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm(gradients))
    if max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def all_reduce_flags(loss: Tensor, norm: Tensor, signal: int) -> Tensor:
    """Return (flag, signal) of a training step as a float32 tensor (2,), the same on every rank.

    The flag is 1 if the loss or the gradient norm is not finite on any rank, else 0. The returned
    signal is the highest `signal` of all ranks. signal: number of the signal, such as SIGTERM, that
    this rank received, or 0.
    """
    good = (loss.isfinite() & norm.isfinite()).float()
    flags = torch.stack([1 - good, torch.full_like(good, signal)])
    if torch_dist.is_initialized():
        torch_dist.all_reduce(flags, torch_dist.ReduceOp.MAX)
    return flags


class BatchNormSnapshot:
    """A copy of the running statistics of batch norms, to undo a skipped step.

    The forward pass changes the statistics before it is known whether the step is skipped.
    """

    def __init__(self, model: nn.Module):
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    def keep(self) -> None:
        """Copy the running statistics. Call this before the forward pass."""
        self.copies = [buffer.clone() for buffer in self.buffers]

    def restore(self, bad: Tensor) -> None:
        """Restore the copied running statistics if the flag `bad` is 1. Call this after the forward
        pass."""
        for buffer, copy in zip(self.buffers, self.copies):
            buffer.copy_(torch.where(bad > 0, copy, buffer))


def update(optimizer: Optimizer, bad: Tensor) -> None:
    """Run the optimizer's step unless the float32 flag `bad` is 1.

    torch's fused optimizers read the flag on the device. For other optimizers, the host reads the
    flag, and waits for the device.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, bad
        try:
            fused.step()
        finally:
            del fused.grad_scale, fused.found_inf
    elif not bad.item():
        optimizer.step()


class DelayedFlags:
    """A reader of the flags of each step (see `Flags`).

    On a GPU, `read` returns the flags of the previous step, so that the host does not wait for the
    device.
    """

    def __init__(self, device: torch.device):
        self.is_delayed = device.type == "cuda"
        self.copied: tuple[Tensor, Any, Mapping[str, Any]] | None = None

    def read(self, flags: Tensor, record: Mapping[str, Any]) -> Flags:
        """Return the flags of this step or, on a GPU, of the previous step.

        flags: result of `all_reduce_flags` for this step. record: values that describe this step,
        which are returned with its flags.
        """
        if self.is_delayed:
            previous, host, done = self.copied, torch.empty(2, pin_memory=True), torch.cuda.Event()
            host.copy_(flags, non_blocking=True)
            done.record()
            self.copied = host, done, record
            if previous is None:
                return Flags()
            flags, done, record = previous
            done.synchronize()
        bad, signal = flags.tolist()
        return Flags(bool(bad), int(signal), record)


class NonFiniteSteps:
    """A counter of consecutive skipped steps. After more than `limit` of them, it writes a crash
    file and raises DivergedError. folder: the run's folder, for the crash file."""

    def __init__(self, limit: int, folder: Path, rank: int):
        self.limit, self.file = limit, folder / "crash" / f"not-finite-rank{rank}.json"
        self.in_a_row = 0

    def count(self, flags: Flags, model: nn.Module, step: int) -> int:
        """Count the step that `flags` describes. Returns 1 if it was skipped, else 0.

        After more than `self.limit` skipped steps in a row, writes a crash file and raises
        DivergedError. step: number of the current step, whose gradients the model has. On a GPU,
        `flags` describes the previous step, see `DelayedFlags`.
        """
        self.in_a_row = self.in_a_row + 1 if flags.bad else 0
        if self.in_a_row > self.limit:
            record, details = dict(flags.record), f"{self.file} lists the largest gradients"
            record |= {"samples": record["samples"].tolist(), "gradients_of_step": step}
            try:
                dump(self.file, model, record)
            except OSError as error:
                details = f"{self.file} cannot be written: {error.strerror or error}"
            raise DivergedError(
                f"loss or gradient not finite in {self.in_a_row} steps in a row, up to step "
                f"{record['step']}: lower OPTIM.LR, or set OPTIM.CLIP_GRAD; {details}"
            )
        return int(flags.bad)


def dump(file: Path, model: nn.Module, record: dict[str, Any]) -> None:
    """Write `record` and the parameters with the largest gradients to a JSON file for debugging."""
    file.parent.mkdir(exist_ok=True)
    sizes = {
        name: {"weight": max_abs(p), "gradient": None if p.grad is None else max_abs(p.grad)}
        for name, p in model.named_parameters()
    }
    worst = sorted(sizes, key=lambda name: sort_key(sizes[name]["gradient"]), reverse=True)
    values = {name: value() if callable(value) else value for name, value in record.items()}
    largest = {name: sizes[name].items() for name in worst[:MAX_LISTED]}
    values["largest"] = {name: {k: as_json(v) for k, v in own} for name, own in largest.items()}
    file.write_text(json.dumps(values, indent=1, default=str) + "\n")


def max_abs(x: Tensor) -> float:
    x = local(x.detach())
    return x.abs().max().item() if x.numel() else 0.0


def as_json(value: float | None) -> float | str | None:
    """Convert NaN and Inf to a string such as "nan", because JSON cannot represent them. Any other
    value is returned unchanged."""
    return value if value is None or math.isfinite(value) else str(value)


def sort_key(value: float | None) -> float:
    """Return a key for sorting in descending order, with NaN first and None last."""
    return -1.0 if value is None else math.inf if math.isnan(value) else value
