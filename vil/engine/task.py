"""What is learnt: a task owns the loss and the evaluation; the loop knows neither.

Letters: B images, K classes. A batch has `images (B, 3, H, W)`, `targets`: classes (B,) int64 or
soft targets (B, K) float, `indices`, `epoch`, `step` and `to(device, memory_format)`, which returns
the same type.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.engine.distributed import all_reduce_sum, unwrap
from vil.utils.errors import DataError


class Task(Protocol):
    """What `train` asks of a task."""

    best: str  # the figure of the first test set that decides which checkpoint is best
    amp_dtype: torch.dtype | None  # precision of autocast, None: full

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """A scalar to go down, and detached scalars to log; called under autocast."""

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, Any]]:
        """Figures of each test set, the same on every rank; `best` is among them."""


class ClassificationTask:
    """One class per image: cross entropy, top-1 and top-5.

    `test_loaders` yield batches, each rank its own part of the set, in any number and size. `mix`
    turns a training batch into one with soft targets (mixup). `per_class` adds a table of
    right answers and images per class to the evaluation.
    """

    best = "top1"

    def __init__(
        self,
        *,
        device: torch.device,
        test_loaders: dict[str, Iterable],
        classes: int,
        label_smoothing: float = 0.0,
        mix: Callable[[Any], Any] | None = None,
        amp_dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        per_class: bool = False,
    ):
        self.device, self.test_loaders, self.classes = device, test_loaders, classes
        self.label_smoothing, self.mix = label_smoothing, mix
        self.amp_dtype, self.memory_format = amp_dtype, memory_format
        self.per_class = per_class

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Training loss and top-1 in percent. Soft targets are not smoothed once more."""
        batch = batch.to(self.device, self.memory_format)
        if self.mix is not None:
            batch = self.mix(batch)
        logits, targets = model(batch.images), batch.targets
        if targets.is_floating_point():
            loss = -(targets * F.log_softmax(logits, dim=-1)).sum(dim=-1).mean()
            targets = targets.argmax(dim=-1)
        else:
            loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        right = logits.detach().argmax(dim=-1) == targets
        return loss, {"top1": 100 * right.float().mean()}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, Any]]:
        """{test set: {loss, top1, top5, count[, per_class]}}, accuracies in percent.

        The loss is plain cross entropy whatever the training loss was, so that runs with and
        without mixup or smoothing compare (the original smoothed it when mixup was off).
        """
        with evaluating(unwrap(model)) as plain:
            return {name: self.measure(plain, part) for name, part in self.test_loaders.items()}

    def measure(self, model: nn.Module, batches: Iterable) -> dict[str, Any]:
        """The figures of one test set. Integers are counted and one sum of losses is kept, so that
        they do not depend on how the images are spread over batches and ranks."""
        k = min(5, self.classes)
        # float64: 50,000 losses add up without error; MPS has none and gets float32
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        loss_sum = torch.zeros((), dtype=wide, device=self.device)
        counts = torch.zeros(3, dtype=torch.int64, device=self.device)  # images, top-1, top-k
        table = torch.zeros(2, self.classes, dtype=torch.int64, device=self.device)
        for batch in batches:
            batch = batch.to(self.device, self.memory_format)
            targets = batch.targets
            with autocast(self.device, self.amp_dtype):
                logits = model(batch.images)
                losses = F.cross_entropy(logits, targets, reduction="none")
            loss_sum += losses.to(wide).sum()
            hits = logits.topk(k, dim=-1).indices == targets[:, None]  # (B, k)
            right = hits[:, 0].long()
            counts += torch.stack([torch.ones_like(right), right, hits.sum(dim=-1)]).sum(dim=-1)
            if self.per_class:
                table[0].index_add_(0, targets, right)
                table[1].index_add_(0, targets, torch.ones_like(right))
        images, top1, top5 = all_reduce_sum(counts).tolist()
        if images == 0:
            raise DataError("a test set without a readable image cannot be evaluated")
        figures: dict[str, Any] = {
            "loss": all_reduce_sum(loss_sum).item() / images,
            "top1": 100 * top1 / images,
            "top5": 100 * top5 / images,
            "count": images,
        }
        if self.per_class:
            right_of_class, of_class = all_reduce_sum(table).tolist()
            figures["per_class"] = {"right": right_of_class, "count": of_class}
        return figures


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Mixed precision in `dtype`; None: nothing changes."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """The model in eval mode without gradients, then as it was.

    no_grad and not inference_mode: a tensor that a module caches under the latter (a mask, a
    position table) could not be used in training afterwards.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        model.train(was_training)
