"""Detections of one image, stored on the CPU with masks that are cropped to their boxes.

torchvision's float masks have the size of the image. For 4096 x 4096 pixels, 100 of them take 6.7
GB.

Shapes: n detections, (H, W) size of the image, (h, w) size of a mask's crop.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

THRESHOLD = 0.5  # a pixel with a higher probability belongs to the mask
MARGIN = 2  # pixels around a box that its crop includes: torchvision's masks may exceed the box


class Mask(NamedTuple):
    """Mask of an object, as a boolean crop whose top left pixel is (left, top) of the image."""

    left: int
    top: int
    pixels: np.ndarray  # (h, w) bool

    def runs(self, size: tuple[int, int]) -> list[int]:
        """Return the run lengths of the mask in COCO's RLE format, for an image of `size` (H, W).

        The running time depends on the size of the mask's crop, not on the size of the image.
        """
        height, width = self.pixels.shape
        columns = np.zeros((width, height + 2), np.int8)  # padded by zeros
        columns[:, 1:-1] = self.pixels.T
        changes = np.diff(columns, axis=1)
        start, end = (
            (self.left + column) * size[0] + self.top + row
            for column, row in (np.nonzero(changes == sign) for sign in (1, -1))
        )
        separate = start[1:] != end[:-1]  # runs of consecutive full columns are joined
        start = start[np.r_[True, separate][: len(start)]]
        end = end[np.r_[separate, True][: len(end)]]
        borders = np.stack([start, end], axis=1).ravel()
        runs = np.diff(np.concatenate([[0], borders, [size[0] * size[1]]])).tolist()
        return runs if runs[-1] else runs[:-1]


@dataclass(frozen=True)
class Detections:
    """Detections of one image, sorted by descending score, or ground-truth objects with score 1."""

    boxes: Tensor  # (n, 4) float32, x1 y1 x2 y2 in pixels
    labels: Tensor  # (n,) int64, from 1
    scores: Tensor  # (n,) float32
    masks: list[Mask] | None = None  # None without a mask head

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> "Detections":
        """Return the detections selected by int64 indices or by a boolean mask (n,)."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        masks = None if self.masks is None else [self.masks[i] for i in indices.tolist()]
        return Detections(self.boxes[indices], self.labels[indices], self.scores[indices], masks)

    def shift(self, left: int, top: int) -> "Detections":
        """Convert detections in a crop of an image to coordinates in the full image.

        left, top: coordinates of the crop's top left pixel in the full image.
        """
        masks = self.masks
        if masks is not None:
            masks = [Mask(mask.left + left, mask.top + top, mask.pixels) for mask in masks]
        return replace(self, boxes=self.boxes + torch.tensor([left, top, left, top]), masks=masks)


def from_output(output: dict[str, Tensor]) -> Detections:
    """Convert a detector's output for one image to detections on the CPU.

    output: dict with `boxes` (n, 4), `labels` (n,), `scores` (n,) and, optionally, `masks`
    (n, 1, H, W), which are probabilities.
    """
    masks = output["masks"][:, 0] > THRESHOLD if "masks" in output else None
    return _to_cpu(output, output["scores"], masks)


def from_target(target: dict) -> Detections:
    """Convert a target of a dataset to detections with score 1.

    target: see `DetectionBatch`. It may have masks (n, H, W).
    """
    masks = target["masks"] > 0 if "masks" in target else None
    return _to_cpu(target, torch.ones(len(target["labels"])), masks)


def _to_cpu(output: dict, scores: Tensor, masks: Tensor | None) -> Detections:
    crops = None if masks is None else crop_masks(masks, output["boxes"])
    boxes, labels = output["boxes"].float().cpu(), output["labels"].cpu()
    return Detections(boxes, labels, scores.float().cpu(), crops)


def crop_masks(masks: Tensor, boxes: Tensor) -> list[Mask]:
    """Crop masks (n, H, W) bool to their boxes (n, 4) plus MARGIN pixels on each side.

    The crops are on the CPU.
    """
    height, width = masks.shape[-2:]
    low = (boxes[:, :2].float().cpu().floor().long() - MARGIN).clamp(min=0)
    high = boxes[:, 2:].float().cpu().ceil().long() + MARGIN
    high = torch.minimum(high, torch.tensor([width, height]))
    low = torch.minimum(low, high)  # so that a box outside of the image has an empty crop
    return [
        Mask(left, top, mask[top:bottom, left:right].cpu().numpy().copy())
        for mask, (left, top, right, bottom) in zip(masks, torch.cat([low, high], dim=1).tolist())
    ]
