"""The classes of all pixels of an image that does not fit into memory: `vil predict --stream`.

The maps of the body's stages are streamed to files (`vil.streaming`). Besides enlarging these maps,
the head `mlp` processes each position independently. So it is applied to bands of rows, one after
another, with one more row of each map above and below. The streamed maps have no cells entirely in
the padding of the image. The model's maps are 0 there. The classes equal those of the whole image,
except for rounding.

Shapes: K classes, H W size of the image; for stage i of the body, from the finest that the head
uses: d_i channels, X_i Y_i rows and columns of the model's map.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.streaming import StreamResult
from vil.streaming.map_files import release_pages
from vil.streaming.memory import peak_of
from vil.streaming.outputs import map_shapes
from vil.streaming.plan import format_bytes
from vil.streaming.progress import Report
from vil.tasks.base import ImageMeta, Task
from vil.tasks.segmentation.heads import MlpHead, enlarge
from vil.tasks.segmentation.models import pad_or_crop
from vil.tasks.segmentation.predictions import Prediction
from vil.tasks.streamed_model import StreamedModel
from vil.utils.errors import ConfigError

ReadRows = Callable[[int, int], Tensor]  # takes the first row and the end row (exclusive)
MAX_ROWS = 64  # of the finest map in a band; in higher bands, repeated rows take less than 5 %
MAX_SMALL = 256  # classes whose numbers fit into uint8


class StreamedSegmentation(StreamedModel):
    """The streamed body of a segmentation model, and its head in bands.

    It can save the map "classes", of class numbers. Raises ConfigError if the head is not `MlpHead`
    or the body is not an MsViT.
    """

    pad = True
    network_share = 0.75  # measured for ViL-Nano, 3 classes and 5400 x 2700 pixels

    def __init__(self, task: Task, model: nn.Module) -> None:
        head = getattr(model, "head", None)
        if not isinstance(head, MlpHead):
            raise ConfigError(
                "only the head mlp (SEGMENTATION.MODEL) can be streamed: this model's decoder has "
                "convolutions or norms that need more of the image than a band of rows"
            )
        super().__init__(task, model.body)
        count = len(head.factors)
        self.head = head
        self.outputs = [f"stages.{i}" for i in range(len(self.network.stages))[-count:]]
        is_small = head.classifier.out_channels <= MAX_SMALL
        self.own_maps = {"classes": np.dtype(np.uint8 if is_small else np.uint16)}
        self.palette = task.palette
        self.rows = 1  # of the finest map in a band

    def plan(self, size: tuple[int, int], memory: int) -> str:
        shapes = map_shapes(self.network, tuple(self.outputs), size, pad=True)
        parameter = next(self.head.parameters())

        def read(index: int, first: int, stop: int) -> Tensor:
            channels, rows, cols = shapes[self.outputs[index]]
            return parameter.new_empty(1, channels, min(stop, rows) - first, cols)

        bands = Bands(self.head, size, read)

        def peak(count: int) -> int:
            edges = bands.split(count)
            middle = edges[(len(edges) - 1) // 2]
            return peak_of(lambda: classify(bands.logits(*middle)))

        self.rows = MAX_ROWS
        while (most := peak(self.rows)) > memory and self.rows > 1:
            self.rows //= 2
        if most > memory:
            raise ConfigError(
                f"the memory limit {format_bytes(memory)} is too small for the head: the smallest "
                f"possible limit for {size[0]} x {size[1]} pixels is {-(-most // 2**20)} MiB"
            )
        disk = sum(map(math.prod, shapes.values())) * parameter.itemsize
        return (
            f"head in bands of {self.rows * self.head.stride} rows of pixels: peak "
            f"{format_bytes(most)}, maps of the stages on disk {format_bytes(disk)}"
        )

    def logits(self, result: StreamResult, size: tuple[int, int]) -> Tensor:
        bands = self._bands(result, size)
        return torch.cat([bands.logits(*band)[0] for band in bands.split(1)], dim=1)

    @torch.no_grad()
    def predict(
        self,
        result: StreamResult,
        meta: ImageMeta,
        maps: Mapping[str, np.ndarray],
        progress: Report = lambda share: None,
    ) -> Prediction | None:
        bands = self._bands(result, meta.size)
        counts = np.zeros(self.head.classifier.out_channels, np.int64)
        for first, stop in bands.split(self.rows):
            classes, is_finite = classify(bands.logits(first, stop))
            if not is_finite:
                return None
            counts += torch.bincount(classes.flatten(), minlength=len(counts)).cpu().numpy()
            if "classes" in maps:
                maps["classes"][first:stop] = classes.cpu().numpy()
            del classes  # before the next band
            for array in (*maps.values(), *result.outputs.values()):
                release_pages(array)
            progress(stop / meta.size[0])
        return Prediction(meta.name, meta.size, palette=self.palette, counts=counts)

    def _bands(self, result: StreamResult, size: tuple[int, int]) -> "Bands":
        like = next(self.head.parameters())

        def read(index: int, first: int, stop: int) -> Tensor:
            rows = result[self.outputs[index]][:, first:stop]
            return torch.as_tensor(rows)[None].to(like)  # device and dtype

        return Bands(self.head, size, read)


class Bands:
    """The logits of a segmentation model, computed in bands of rows.

    size: (H, W). read: function of the index of a map, its first row and its end row (exclusive)
    that returns these rows, (1, d_i, rows, columns), without the cells entirely in the padding.
    """

    def __init__(
        self, head: MlpHead, size: tuple[int, int], read: Callable[[int, int, int], Tensor]
    ) -> None:
        self.head, self.size, self.read = head, size, read
        self.rows, self.cols = ((n + -n % head.divisor) // head.stride for n in size)  # X_1, Y_1

    def split(self, count: int) -> list[tuple[int, int]]:
        """Return the bands, as (first row, end row) in pixels. count: rows of the finest map in a
        band."""
        height, step = self.size[0], count * self.head.stride
        return [(first, min(first + step, height)) for first in range(0, height, step)]

    def logits(self, first: int, stop: int) -> Tensor:
        """Return the logits (1, K, stop - first, W) of rows of pixels."""
        rows = enlarge_rows(self._fine_logits, self.rows, self.head.stride, first, stop)
        return rows[..., : self.size[1]]

    def _fine_logits(self, first: int, stop: int) -> Tensor:
        """Return the logits (1, K, stop - first, Y_1) of rows of the finest map."""
        total = None
        for index, factor in enumerate(self.head.factors):
            read = partial(self._project, index)
            rows = enlarge_rows(read, self.rows // factor, factor, first, stop)
            total = rows if total is None else total + rows
        logits = self.head.classify(total)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _project(self, index: int, first: int, stop: int) -> Tensor:
        x, cols = self.read(index, first, stop), self.cols // self.head.factors[index]
        x = pad_or_crop(x, stop - first, cols)
        return self.head.layers[index](self.head.norms[index](x))


def enlarge_rows(read: ReadRows, rows: int, factor: int, first: int, stop: int) -> Tensor:
    """Return rows `first` to `stop` - 1 of `enlarge(x, factor)` for a map x (B, C, rows, Y).

    read: function that returns rows of x.
    """
    if factor == 1:
        return read(first, stop)
    top, bottom = first // factor - 1, -(-stop // factor) + 1  # with a row above and below
    x = read(max(top, 0), min(bottom, rows))
    missing = (max(-top, 0), max(bottom - rows, 0))
    if any(missing):
        x = F.pad(x, (0, 0, *missing), mode="replicate")
    return enlarge(x, factor)[:, :, first - top * factor : stop - top * factor]


def classify(logits: Tensor) -> tuple[Tensor, Any]:
    """Return the class numbers (H, W) of logits (1, K, H, W), and whether all logits are finite."""
    return logits.argmax(1)[0], logits.sum().isfinite()
