"""Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899) of a batch, with timm's implementation.

They run on the device of the batch, not in the loader.
"""

from dataclasses import replace
from typing import Any

import torch
from timm.data.mixup import Mixup, mixup_target

from vil.data.batch import Batch
from vil.data.samplers import fork_rng
from vil.utils.lookup import lookup

# Sample the mixing ratio and the box once per batch, per pair of samples, or per sample.
MODES = dict.fromkeys(("batch", "pair", "elem"))


class Mix:
    """mix(batch, rank) -> the batch with mixed images and soft targets (B, K), label smoothing
    included. The random numbers are a function of (seed, epoch, step, rank).
    """

    def __init__(self, num_classes: int, *, seed: int = 0, mode: str = "batch", **options: Any):
        """options: mixup_alpha, cutmix_alpha, cutmix_minmax, prob, switch_prob and label_smoothing
        of timm's Mixup. Mixing and smoothing that are not mentioned are off."""
        lookup(MODES, mode, "mixup mode")
        alphas = [options.get(name, 0.0) for name in ("mixup_alpha", "cutmix_alpha")]
        if max(alphas) <= 0 and not options.get("cutmix_minmax"):
            raise ValueError("mixing needs mixup_alpha > 0, cutmix_alpha > 0 or cutmix_minmax")
        self.seed = seed
        options = {"mixup_alpha": 0.0, "label_smoothing": 0.0} | options
        self.mixup = Mixup(mode=mode, num_classes=num_classes, **options)

    def __call__(self, batch: Batch, rank: int = 0) -> Batch:
        """Mix sample i with sample B - 1 - i. The last sample of an odd batch is not mixed: timm's
        pairs would leave the middle one without a ratio."""
        even = len(batch) - len(batch) % 2
        images = batch.images.clone()  # timm mixes in place
        with fork_rng("mix", self.seed, batch.epoch, batch.step, rank):
            _, mixed = self.mixup(images[:even], batch.targets[:even])
        unmixed = mixup_target(
            batch.targets[even:], self.mixup.num_classes, smoothing=self.mixup.label_smoothing
        )
        return replace(batch, images=images, targets=torch.cat([mixed, unmixed]))
