"""Apply Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899) to batches, as implemented in timm.

Mixing runs on the device of the batch, not in the loader.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor

from vil.data.batch import Batch
from vil.data.samplers import fork_rng
from vil.utils.lookup import lookup

# Sample the mixing ratio and the box once per batch, per pair of samples, or per sample.
MODES = dict.fromkeys(("batch", "pair", "elem"))


class Mix:
    """A callable that applies Mixup or CutMix to a batch and smooths the labels. The random numbers
    depend only on (seed, epoch, step, rank)."""

    def __init__(self, num_classes: int, *, seed: int = 0, mode: str = "batch", **options: Any):
        """Create the mixer. Raises ValueError if neither Mixup nor CutMix is enabled.

        Args:
            mode: whether to sample the mixing ratio and the CutMix box per "batch", per "pair" of
                samples, or per sample ("elem").
            options: mixup_alpha, cutmix_alpha, cutmix_minmax, prob, switch_prob and label_smoothing
                of timm's Mixup. Mixup, CutMix and label smoothing are off by default.
        """
        lookup(MODES, mode, "mixup mode")
        alphas = [options.get(name, 0.0) for name in ("mixup_alpha", "cutmix_alpha")]
        if max(alphas) <= 0 and not options.get("cutmix_minmax"):
            raise ValueError(
                "set mixup_alpha > 0, cutmix_alpha > 0 or cutmix_minmax to enable mixing"
            )
        self.seed = seed
        options = {"mixup_alpha": 0.0, "label_smoothing": 0.0} | options
        self.mixup = Mixup(mode=mode, num_classes=num_classes, **options)

    def __call__(self, batch: Batch, rank: int = 0) -> Batch:
        """Return a batch with mixed images and soft targets (B, K) for the K classes.

        If B is even, sample i is mixed with sample B - 1 - i. If B is odd, the last sample is not
        mixed, because timm's Mixup requires an even batch size, and sample i of the others is
        mixed with sample B - 2 - i. rank: selects the random numbers.
        """
        even = len(batch) - len(batch) % 2
        images = cast(Tensor, batch.images).clone()  # on the device; timm mixes in place
        with fork_rng("mix", self.seed, batch.epoch, batch.step, rank):
            _, mixed = self.mixup(images[:even], batch.targets[:even])
        unmixed = mixup_target(
            batch.targets[even:], self.mixup.num_classes, smoothing=self.mixup.label_smoothing
        )
        return replace(batch, images=images, targets=torch.cat([mixed, unmixed]))
