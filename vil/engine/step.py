"""Two moments of a training step: the rate of each group, and the gradients of a batch in parts."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from vil.engine.fsdp import is_sharded
from vil.engine.task import Task, autocast


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """The rate of a step; groups of a layer have a factor of their own (layer-wise decay)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def backward(
    task: Task,
    model: nn.Module,
    batch: Any,
    scaler: GradScaler,
    parts: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Add the (scaled) gradients of the batch's mean loss; returns the loss and its figures.

    The prepared batch runs in `parts` equal parts, one after the other: their gradients add up to
    those of the whole, in the memory of one. Only batch norms and the draws of dropout differ.
    """
    means: dict[str, Tensor] = {}
    for number, part in enumerate(task.parts(batch, parts), start=1):
        if is_sharded(model):
            model.set_requires_gradient_sync(number == parts)
        with exchange(model, number == parts):
            with autocast(device, task.amp_dtype):
                loss, figures = task.loss(model, part)
            scaler.scale(loss / parts).backward()
        for name, value in {"loss": loss, **figures}.items():
            means[name] = means.get(name, 0) + value.detach() / parts
    return means


def exchange(model: nn.Module, now: bool) -> AbstractContextManager:
    """Whether DDP averages gradients over the ranks: once per step, with the last part."""
    return nullcontext() if now or not hasattr(model, "no_sync") else model.no_sync()
