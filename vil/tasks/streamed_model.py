"""What a task streams for `vil predict --stream`, and how this becomes a prediction.

Shapes: c channels, h w size of an image, K outputs of the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vil.streaming import StreamResult
from vil.streaming.checks import find_network
from vil.streaming.progress import Report
from vil.tasks.base import ImageMeta, Task


class StreamedModel:
    """The part of a task's model that is streamed, and what is computed from its outputs. This base
    class streams the logits of an MsViT, and treats them as the output of the model.

    network: the MsViT. outputs: the outputs of the network that the prediction needs. pad: see
    `vil.streaming.prepare`. own_maps: {name: dtype} of the maps of classes (h, w) that `predict`
    can compute. palette (K, 3): their colors, uint8. network_share: estimated fraction of the time
    that the network takes.

    Raises ConfigError if the model cannot be streamed.
    """

    outputs: Sequence[str] = ("logits",)
    pad = False
    own_maps: Mapping[str, np.dtype] = {}
    palette: np.ndarray | None = None
    network_share = 1.0

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.network = task, find_network(model)

    def plan(self, size: tuple[int, int], memory: int) -> str:
        """Plan what `predict` computes for an image of `size` (h, w) in at most `memory` bytes, and
        return the plan as text. Raises ConfigError if no plan stays within `memory`."""
        return ""

    def logits(self, result: StreamResult, size: tuple[int, int]) -> Tensor:
        """Return the logits that the model computes for an image, without the batch dimension.

        result: the network's outputs. size: (h, w). The computation uses as little memory as
        possible.
        """
        return result.logits

    def predict(
        self,
        result: StreamResult,
        meta: ImageMeta,
        maps: Mapping[str, np.ndarray],
        progress: Report = lambda share: None,
    ) -> Any | None:
        """Return the prediction for an image, or None if the model's output is not finite.

        result: the network's outputs. maps: {name: array}, of which those in `own_maps` are to be
        filled. progress: function that is called with the fraction of the work that is done.
        """
        logits = result.logits[None]
        output = self.task.run(lambda images: logits, [torch.zeros(1)])
        return self.task.postprocess(output, [meta])[0] if output.isfinite().all() else None
