"""Evaluate a test set image by image: what `vil report` shows beside the figures."""

import numpy as np

from vil.tasks.classification.predictions import Answers


def collect(task, model, name: str) -> Answers:
    """The answers of a model to the images of one test set, judged as `task.evaluate` judges them.

    A few bytes are kept per image, and no picture. Raises DataError for a set without a readable
    image.
    """
    from vil.engine.distributed import unwrap
    from vil.engine.task import evaluating
    from vil.utils.errors import DataError

    links, parts = task.links.get(name), []
    with evaluating(unwrap(model)) as plain:
        for batch in task.test_loaders[name]:
            parts.append([part.cpu().numpy() for part in _of_batch(task, plain, batch, links)])
    if not parts:
        raise DataError("a test set without a readable image cannot be evaluated")
    return Answers(*map(np.concatenate, zip(*parts)))


def _of_batch(task, model, batch, links) -> tuple:
    """The fields of Answers, (B,) each."""
    from vil.engine.task import autocast
    from vil.tasks.classification.topk import by_class, by_links

    moved = batch.to(task.device, task.memory_format)
    with autocast(task.device, task.amp_dtype):
        logits = model(moved.images)
        scores = (
            by_class(logits, moved.targets)
            if links is None
            else by_links(logits, moved.targets, links)
        )
    logits = logits.float()
    if links is not None:  # classes that stand for none of the test set are out of the running
        logits = logits.masked_fill(~links.any(dim=1), -float("inf"))
    probability, predicted = logits.softmax(-1).max(-1)
    return (
        batch.indices, moved.targets, predicted, scores.first, scores.five, probability,
        scores.losses.float(), scores.judged,
    )  # fmt: skip
