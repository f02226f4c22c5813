"""What is learnt: a task owns the loss and the evaluation; the loop knows neither.

Letters: B images, K classes. A batch has `images (B, 3, H, W)`, `targets`: classes (B,) int64 or
soft targets (B, K) float, `indices`, `epoch`, `step` and `to(device, memory_format)`, which returns
the same type; it is a dataclass.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vil.engine.distributed import all_reduce_max, all_reduce_sum, unwrap
from vil.engine.fsdp import unsharded
from vil.tasks.classification.losses import Loss, xentropy
from vil.tasks.classification.topk import by_class, by_links
from vil.utils.errors import DataError
from vil.utils.lookup import lookup


class Task(Protocol):
    """What `train` asks of a task."""

    best: str  # the figure of the first test set that decides which checkpoint is best
    amp_dtype: torch.dtype | None  # precision of autocast, None: full

    def prepare(self, batch: Any) -> Any:
        """A step's batch on the device, changed as it is trained on (mixed)."""

    def parts(self, batch: Any, count: int) -> Iterable[Any]:
        """A prepared batch in equal parts."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """A mean over a prepared batch to go down, and detached scalars to log; under autocast."""

    def evaluate(
        self, model: nn.Module, between: Callable[[], None] = ...
    ) -> dict[str, dict[str, Any]]:
        """Figures of each test set, the same on every rank; `best` is among them. `between` is
        called before each batch, on every rank as often; what it raises ends the evaluation."""


class ClassificationTask:
    """One class per image: cross entropy or another loss, top-1 and top-5.

    `test_loaders` yield batches, each rank its own part of the set, in any number and size. `mix`
    turns a training batch into one with soft targets (mixup). `loss` is one of losses.py.
    `links` {test set: bool (K, C)} says for a test set with C classes of its own which of the
    model's K mean the same (scores.py). `per_class` adds a table of right answers and images per
    class of the test set to the evaluation.
    """

    best = "top1"

    def __init__(
        self,
        *,
        device: torch.device,
        test_loaders: dict[str, Iterable],
        classes: int,
        loss: Loss = xentropy,
        label_smoothing: float = 0.0,
        mix: Callable[[Any], Any] | None = None,
        amp_dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        per_class: bool = False,
        links: dict[str, Tensor] | None = None,
    ):
        self.device, self.test_loaders, self.classes = device, test_loaders, classes
        self.criterion, self.label_smoothing, self.mix = loss, label_smoothing, mix
        self.amp_dtype, self.memory_format = amp_dtype, memory_format
        self.per_class = per_class
        self.links = {name: link.to(device) for name, link in (links or {}).items()}
        for name, link in self.links.items():
            lookup(test_loaders, name, "test set with linked classes")
            if link.dtype != torch.bool or len(link) != classes or not link.any():
                raise ValueError(
                    f"the links of {name} must be booleans ({classes}, C) with one true at least, "
                    f"given {link.dtype} {tuple(link.shape)} with {int(link.sum())} true"
                )

    def prepare(self, batch: Any) -> Any:
        """The batch on the device, mixed."""
        batch = batch.to(self.device, self.memory_format)
        return self.mix(batch) if self.mix is not None else batch

    def parts(self, batch: Any, count: int) -> list[Any]:
        """The batch in `count` equal parts, in its order."""
        images = len(batch.targets)
        size, rest = divmod(images, count)
        assert size > 0, f"{images} images in {count} parts"
        assert rest == 0, f"{images} images do not divide into {count} equal parts"
        cuts = [slice(start, start + size) for start in range(0, images, size)]
        return [
            replace(
                batch,
                images=batch.images[cut],
                targets=batch.targets[cut],
                indices=batch.indices[cut],
            )
            for cut in cuts
        ]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Training loss and top-1 in percent. Soft targets are not smoothed once more."""
        logits, targets = model(batch.images), batch.targets
        loss = self.criterion(logits, targets, self.label_smoothing)
        if targets.is_floating_point():
            targets = targets.argmax(dim=-1)
        right = logits.detach().argmax(dim=-1) == targets
        return loss, {"top1": 100 * right.float().mean()}

    def evaluate(
        self, model: nn.Module, between: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, Any]]:
        """{test set: {loss, top1, top5, count[, per_class]}}, accuracies in percent.

        The loss is plain cross entropy whatever the training loss was, so that runs with and
        without mixup or smoothing compare (the original smoothed it when mixup was off), a mean
        over images.
        """
        with evaluating(unwrap(model)) as plain:
            return {name: self.measure(plain, name, between) for name in self.test_loaders}

    def measure(self, model: nn.Module, name: str, between: Callable[[], None]) -> dict[str, Any]:
        """The figures of one test set. Integers are counted and one sum of losses is kept, so that
        they do not depend on how the images are spread over batches and ranks."""
        links = self.links.get(name)
        score = by_class if links is None else partial(by_links, links=links)
        # float64: 50,000 losses add up without error; MPS has none and gets float32
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        integers = dict(dtype=torch.int64, device=self.device)
        loss_sum = torch.zeros((), dtype=wide, device=self.device)
        counts = torch.zeros(4, **integers)  # images, top-1, top-5, those with a loss
        table = torch.zeros(2, self.classes if links is None else links.shape[1], **integers)
        for batch in in_step(self.test_loaders[name], between):
            batch = batch.to(self.device, self.memory_format)
            with autocast(self.device, self.amp_dtype):
                scores = score(model(batch.images), batch.targets)
            loss_sum += scores.losses.to(wide).sum()
            everyone = torch.ones_like(scores.first)
            answers = torch.stack([everyone, scores.first, scores.five, scores.judged]).long()
            counts += answers.sum(dim=-1)
            if self.per_class:
                table[0].index_add_(0, batch.targets, answers[1])
                table[1].index_add_(0, batch.targets, answers[0])
        images, top1, top5, judged = all_reduce_sum(counts).tolist()
        if images == 0:
            raise DataError("a test set without a readable image cannot be evaluated")
        figures: dict[str, Any] = {
            "loss": all_reduce_sum(loss_sum).item() / judged if judged else math.nan,
            "top1": 100 * top1 / images,
            "top5": 100 * top5 / images,
            "count": images,
        }
        if self.per_class:
            right_of_class, of_class = all_reduce_sum(table).tolist()
            figures["per_class"] = {"right": right_of_class, "count": of_class}
        return figures


def in_step(batches: Sized, between: Callable[[], None]) -> Iterator[Any]:
    """This rank's batches, with as many calls of `between` as the rank with the most batches."""
    iterator = iter(batches)
    for _ in range(all_reduce_max(len(batches))):
        between()
        if (batch := next(iterator, None)) is not None:
            yield batch


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
        with torch.no_grad(), unsharded(model):
            yield model
    finally:
        model.train(was_training)
