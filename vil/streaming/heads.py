"""Apply the final norm, the pooling and the head of a model to tokens that arrive strip by strip.

Shapes: X Y grid of the last stage, L = X*Y, G global tokens, d channels, K classes, n rows.
"""

from typing import Any

import torch
from torch import Tensor

from vil.models.vision_longformer import MsViT
from vil.streaming.rows import Writer
from vil.streaming.tokens import part_size, parts


class Head:
    """The final norm, the pooling and the head of a model, applied to the tokens of its last stage.

    Computes the outputs "logits" and "pooled". If the model pools, they are vectors, which `finish`
    stores in `results`. Otherwise they are maps, whose rows are passed to `writers`.

    writers: {name of a map: function that writes its rows}, for the requested maps.
    """

    def __init__(self, model: MsViT, writers: dict[str, Writer]) -> None:
        self.model, self.writers = model, writers
        self.results: dict[str, Tensor] = {}
        self.count = 0
        self.sum: Tensor | None = None
        self.max: Tensor | None = None

    def add(self, first: int, rows: Tensor) -> None:
        """Process n rows of the last stage's output, (n, columns, channels). first: index of the
        first row."""
        cols, pool = rows.shape[1], self.model.global_pool
        size = part_size(max(rows.shape[-1], self.model.num_classes), rows.dtype)
        if not pool:
            for part in parts(len(rows), max(1, size // cols)):
                self._write(first + part.start, self.model.norm(rows[part]))
            return
        if pool == "token":
            return
        for part in parts(len(rows) * cols, size):
            self._pool(self.model.norm(rows.flatten(0, 1)[part]))

    def _pool(self, tokens: Tensor) -> None:
        """Add T normalized tokens (T, d) to the running sum and maximum."""
        total, most = tokens.double().sum(0), tokens.amax(0)
        self.dtype = tokens.dtype
        self.sum = total if self.sum is None else self.sum + total
        self.max = most if self.max is None else torch.maximum(self.max, most)
        self.count += len(tokens)

    def _write(self, first: int, features: Tensor) -> None:
        """Write rows of normalized tokens to the output "pooled", and their logits to the output
        "logits". An output that was not requested is omitted. features: (n, columns, channels)."""
        if "pooled" in self.writers:
            self.writers["pooled"](first, features)
        if "logits" in self.writers:
            self.writers["logits"](first, self.model.head(features))

    def finish(self, x_global: Tensor) -> None:
        """Compute `results`. x_global (1, G, d): the global tokens of the last stage's output."""
        pool = self.model.global_pool
        if not pool:
            return
        tokens = self.model.norm(x_global[0]) if x_global.shape[1] else None
        if pool == "token":
            features = tokens[0]
        else:
            if tokens is not None:
                self._pool(tokens)
            mean = (self.sum / self.count).to(self.dtype)
            features = {"avg": mean, "max": self.max, "avgmax": 0.5 * (mean + self.max)}[pool]
        self.results["pooled"] = features
        self.results["logits"] = self.model.head(features[None])[0]

    def state(self) -> dict[str, Any]:
        """Return the running sum, maximum and count of the pooling, for `restore`."""
        return {"count": self.count, "sum": self.sum, "max": self.max}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the pooling from the dict that the method `state` returned."""
        device = next(self.model.parameters()).device
        self.count = state["count"]
        if state["sum"] is not None:
            self.sum, self.max = state["sum"].to(device), state["max"].to(device)
            self.dtype = self.max.dtype
