"""Mixup and CutMix of a batch, wherever it lies. The loader does not mix: the model's device does.

mixup: https://arxiv.org/abs/1710.09412. CutMix: https://arxiv.org/abs/1905.04899. Both by timm.
"""

from dataclasses import replace

import torch
from timm.data.mixup import Mixup, mixup_target

from vil.data.batch import Batch
from vil.data.seed_sequence import fork_rng
from vil.utils.lookup import lookup

# Whether one draw serves the batch, a pair of samples, or a sample.
MODES = dict.fromkeys(("batch", "pair", "elem"))


class Mix:
    """mix(batch, rank) -> the batch with mixed images and soft targets (B, K), smoothing included.

    The draw is a function of (seed, epoch, step, rank).
    """

    def __init__(
        self,
        num_classes: int,
        *,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        cutmix_minmax: tuple[float, float] | None = None,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: str = "batch",
        label_smoothing: float = 0.0,
        seed: int = 0,
    ):
        lookup(MODES, mode, "mixup mode")
        if not (mixup_alpha > 0 or cutmix_alpha > 0 or cutmix_minmax):
            raise ValueError("mixing needs mixup_alpha > 0, cutmix_alpha > 0 or cutmix_minmax")
        self.seed = seed
        self.smoothing = {"num_classes": num_classes, "smoothing": label_smoothing}
        self.mixup = Mixup(
            mixup_alpha,
            cutmix_alpha,
            cutmix_minmax or None,
            prob,
            switch_prob,
            mode,
            label_smoothing=label_smoothing,
            num_classes=num_classes,
        )

    def __call__(self, batch: Batch, rank: int = 0) -> Batch:
        """A sample is mixed with its mirror in the batch; an odd batch's last one stays as it is.

        timm refuses odd batches: its pairs give the middle sample no lambda.
        """
        even = len(batch) - len(batch) % 2
        images = batch.images.clone()  # timm mixes in place
        with fork_rng("mix", self.seed, batch.epoch, batch.step, rank):
            _, mixed = self.mixup(images[:even], batch.targets[:even])
        alone = mixup_target(batch.targets[even:], **self.smoothing)
        return replace(batch, images=images, targets=torch.cat([mixed, alone]))
