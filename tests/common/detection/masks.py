"""Masks of detections as images, without run lengths."""

import numpy as np

from vil.tasks.detection.detections import Mask


def paste(mask: Mask, size: tuple[int, int]) -> np.ndarray:
    """The mask in its image, (H, W) uint8."""
    image = np.zeros(size, np.uint8)
    height, width = mask.pixels.shape
    image[mask.top : mask.top + height, mask.left : mask.left + width] = mask.pixels
    return image
