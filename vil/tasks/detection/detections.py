"""What a detector found in one picture, on the host, with masks that are no larger than needed.

A detector of torchvision answers with float masks as large as the picture: of 4096 x 4096 pixels a
hundred of them take 6.7 GB. Here a mask is the part of it around its box, as booleans; it is put
into a picture one at a time, where it is drawn or encoded.

Letters: n detections, H W the picture's size, h w a mask's own.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PROBABLE = 0.5  # a pixel belongs to the object from here on
MARGIN = 2  # pixels around a box that its mask may reach into: torchvision rounds outwards


class Mask(NamedTuple):
    """The pixels of one object; all others of the picture are none of it."""

    left: int
    top: int
    pixels: np.ndarray  # (h, w) bool

    def whole(self, size: tuple[int, int]) -> np.ndarray:
        """The picture's pixels (H, W) uint8."""
        picture = np.zeros(size, np.uint8)
        height, width = self.pixels.shape
        picture[self.top : self.top + height, self.left : self.left + width] = self.pixels
        return picture

    def runs(self, size: tuple[int, int]) -> list[int]:
        """The run lengths of the picture's pixels, column after column, zeros first; in the time of
        this part alone."""
        height, width = self.pixels.shape
        columns = np.zeros((width, height + 2), np.int8)  # each between two zeros
        columns[:, 1:-1] = self.pixels.T
        changes = np.diff(columns, axis=1)
        first, end = (
            (self.left + column) * size[0] + self.top + row
            for column, row in (np.nonzero(changes == sign) for sign in (1, -1))
        )
        apart = first[1:] != end[:-1]  # of a mask as high as the picture columns follow each other
        first, end = first[np.r_[True, apart][: len(first)]], end[np.r_[apart, True][: len(end)]]
        borders = np.stack([first, end], axis=1).ravel()
        runs = np.diff(np.concatenate([[0], borders, [size[0] * size[1]]])).tolist()
        return runs if runs[-1] else runs[:-1]


@dataclass(frozen=True)
class Detections:
    """Boxes x1 y1 x2 y2 in pixels, labels from 1, scores; the best first, as detectors give them.

    True objects are Detections with scores of 1.
    """

    boxes: Tensor  # (n, 4) float32
    labels: Tensor  # (n,) int64
    scores: Tensor  # (n,) float32
    masks: list[Mask] | None = None  # of a detector without a mask head

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, indices: Tensor) -> "Detections":
        """Those at the indices (int64), in that order, or those that are True."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        return Detections(
            self.boxes[indices],
            self.labels[indices],
            self.scores[indices],
            None if self.masks is None else [self.masks[i] for i in indices.tolist()],
        )

    def shifted(self, left: int, top: int) -> "Detections":
        """The same, in a picture that this one is cut out of at (left, top)."""
        masks = self.masks
        if masks is not None:
            masks = [Mask(mask.left + left, mask.top + top, mask.pixels) for mask in masks]
        return replace(self, boxes=self.boxes + torch.tensor([left, top, left, top]), masks=masks)


def from_output(output: dict[str, Tensor]) -> Detections:
    """One picture's answer of a detector in evaluation; masks (n, 1, H, W) are probabilities."""
    masks = None
    if "masks" in output:
        masks = cropped(output["masks"][:, 0] > PROBABLE, output["boxes"])
    return _on_host(output, output["scores"], masks)


def from_target(target: dict) -> Detections:
    """The true objects of a picture; masks (n, H, W) are uint8."""
    masks = cropped(target["masks"] > 0, target["boxes"]) if "masks" in target else None
    return _on_host(target, torch.ones(len(target["labels"])), masks)


def _on_host(found: dict, scores: Tensor, masks: list[Mask] | None) -> Detections:
    boxes, labels = found["boxes"].float().cpu(), found["labels"].cpu()
    return Detections(boxes, labels, scores.float().cpu(), masks)


def cropped(masks: Tensor, boxes: Tensor) -> list[Mask]:
    """The parts of masks (n, H, W) bool around their boxes (n, 4), copied: a view would keep the
    whole in memory."""
    height, width = masks.shape[-2:]
    low = (boxes[:, :2].float().cpu().floor().long() - MARGIN).clamp(min=0)
    high = boxes[:, 2:].float().cpu().ceil().long() + MARGIN
    high = torch.minimum(high, torch.tensor([width, height]))
    low = torch.minimum(low, high)  # a box beyond the picture has an empty mask
    corners = torch.cat([low, high], dim=1).tolist()
    return [
        Mask(left, top, mask[top:bottom, left:right].cpu().numpy().copy())
        for mask, (left, top, right, bottom) in zip(masks, corners)
    ]
