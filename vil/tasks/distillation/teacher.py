"""The teacher: a trained network whose features or outputs another network learns.

Shapes: B images, c channels, S side of the student's images in pixels, D features; X Y rows and
columns of a grid.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.data.dataset import LoadableDataset, fingerprint, image_digests
from vil.models.features import check_features, last_channels, last_stride, pooled_and_map
from vil.tasks.distillation.cache import OutputCache
from vil.utils.errors import ConfigError
from vil.utils.memory import copy_to_device

log = logging.getLogger(__name__)

TRAIN = ""  # the name of the training set among the test sets


class Source(NamedTuple):
    """A network with trained weights.

    build: function (image side, whether to load the weights) that builds the network. image_size:
    its own side in pixels. mean, std: of the images that its weights need, per channel.
    num_outputs: 0 without a head. classes: names of its outputs; empty if they are not known.
    """

    build: Callable[[int, bool], nn.Module]
    image_size: int
    mean: Sequence[float]
    std: Sequence[float]
    num_outputs: int = 0
    classes: Sequence[str] = ()


class Teacher:
    """A network in eval mode that maps the student's images to features or outputs.

    Its images are the student's, resized and normalized as its weights need. The network is found
    by the first attribute that needs it, so that a student works without its teacher.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Source],
        *,
        mean: Sequence[float],
        std: Sequence[float],
        image_size: int = 0,
        cache: Path | None = None,
        cache_key: str = "",
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ):
        """Store the settings of the teacher.

        Args:
            name: of the teacher, for messages.
            find: function that returns its network.
            mean, std: of the student's images, per channel.
            image_size: side of the teacher's images in pixels; 0: its own, or see `fit_grid`.
            cache: folder for its outputs; None: they are not kept. cache_key: text that tells apart
                outputs for the same images, such as with another transform of the images.
        """
        self.name, self.find, self.device = name, find, device
        self.mean, self.std, self.given_size = list(mean), list(std), image_size
        self.cache, self.cache_key = cache, cache_key
        self.required_sizes: tuple[int, int] | None = None  # of a student's projectors
        self._fitted: tuple[tuple[int, int], int] | None = None
        self._datasets: dict[str, LoadableDataset] = {}
        self._caches: dict[tuple[str, str], OutputCache] = {}

    @cached_property
    def source(self) -> Source:
        """Description of the network."""
        source = self.find()
        if len(source.mean) != len(self.mean):
            raise ConfigError(
                f"the teacher {self.name} takes images with {len(source.mean)} channels, but "
                f"INPUT.CHANNELS is {len(self.mean)}: use another teacher"
            )
        return source

    @cached_property
    def network(self) -> nn.Module:
        """The network with its weights, on the device. Raises ConfigError if a student was trained
        with another teacher."""
        if self.required_sizes and self.required_sizes != self.sizes:
            raise ConfigError(
                f"DISTILL.TEACHER {self.name} has features of the sizes {self.sizes}, but the "
                f"network predicts those of {self.required_sizes}, DISTILL.SIZES: use the teacher "
                "that it was trained with or, for a new run, set DISTILL.SIZES to []"
            )
        network = self.source.build(self.image_size, True)
        size, count = self.image_size, sum(p.numel() for p in network.parameters())
        log.info(
            "teacher %s: %s parameters, built for images of %d x %d pixels",
            self.name,
            f"{count:,}",
            size,
            size,
        )
        return network.requires_grad_(False).eval().to(self.device)

    @cached_property
    def outline(self) -> Any:
        """The network without weights, on the meta device."""
        with torch.device("meta"):
            network = self.source.build(self.source.image_size, False)
        check_features(network, f"the teacher {self.name}")
        return network

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Sizes D of the summary and of the dense features."""
        return self.outline.head_hidden_size, last_channels(self.outline)

    def fit_grid(self, grid: tuple[int, int], side: int) -> None:
        """Let the teacher's grid be a multiple of the student's.

        grid: rows and columns of the student, for images of `side` pixels. Without a given image
        size, the teacher's is the one nearest to `side`.
        """
        self._fitted = grid, side

    @cached_property
    def image_size(self) -> int:
        """Side of the teacher's images in pixels. Raises ConfigError if the teacher's grid is not a
        multiple of the student's."""
        if self._fitted is None:
            return self.given_size or self.source.image_size
        (rows, columns), side = self._fitted
        step = rows * last_stride(self.outline)
        if self.given_size % step:
            near = [max(self.given_size // step + more, 1) * step for more in (0, 1)]
            patches = self.given_size / last_stride(self.outline)
            raise ConfigError(
                f"DISTILL.IMAGE_SIZE {self.given_size}: the teacher's grid of {patches:g} x "
                f"{patches:g} patches is not a multiple of the student's, {rows} x {columns}: use "
                f"{' or '.join(map(str, dict.fromkeys(near)))}"
            )
        return self.given_size or max(round(side / step), 1) * step

    @cached_property
    def _normalization(self) -> tuple[Tensor, Tensor]:
        """(factor, offset) per channel that convert the student's images to the teacher's."""
        old_mean, old_std, mean, std = (
            torch.tensor(list(values), device=self.device).view(-1, 1, 1)
            for values in (self.mean, self.std, self.source.mean, self.source.std)
        )
        return old_std / std, (old_mean - mean) / std

    def open(self, datasets: dict[str, LoadableDataset]) -> None:
        """Name the datasets whose outputs may be kept, as {name of a test set or TRAIN:
        dataset}."""
        self._datasets |= datasets
        self._caches = {k: cache for k, cache in self._caches.items() if k[0] not in datasets}

    def prepare(self, images: Tensor) -> Tensor:
        """Resize and normalize the student's images (B, c, S, S) for the teacher."""
        factor, offset = self._normalization
        images = images.float() * factor + offset
        if images.shape[-1] == self.image_size:
            return images
        size = (self.image_size, self.image_size)
        return F.interpolate(images, size, mode="bicubic", antialias=True)

    def features(
        self, batch: Batch, grid: tuple[int, int], dataset: str = TRAIN
    ) -> tuple[Tensor, Tensor]:
        """Return the summaries (B, D) and the dense features (B, X*Y, D) of a batch.

        grid: rows X and columns Y of the student, to which the dense features are averaged.
        dataset: name of the batch's dataset, see `open`. Autocast is the caller's.
        """

        def compute(images: Tensor) -> Tensor:
            summary, dense = pooled_and_map(self.network, self.prepare(images))
            dense = F.adaptive_avg_pool2d(dense.float(), grid)
            return torch.cat([summary.float(), dense.flatten(2).mT.flatten(1)], dim=1)

        rows = self._compute(f"features {grid}", compute, batch, dataset)
        summary = rows[:, : self.sizes[0]]
        return summary, rows[:, self.sizes[0] :].unflatten(1, (-1, self.sizes[1]))

    def outputs(self, batch: Batch) -> Tensor:
        """Return the outputs (B, K) of the network, such as logits, for a batch of the training
        set."""

        def compute(images: Tensor) -> Tensor:
            return self.network(self.prepare(images)).float()

        return self._compute("outputs", compute, batch, TRAIN)

    @torch.no_grad()
    def _compute(
        self, kind: str, compute: Callable[[Tensor], Tensor], batch: Batch, dataset: str
    ) -> Tensor:
        """Return the rows of `compute` (B, R) float32 for a batch, from the cache if possible."""
        if self.cache is None or dataset not in self._datasets:
            return compute(batch.images)
        indices = batch.indices.tolist()
        cache = self._caches.get((dataset, kind))
        if cache is None:
            width = compute(batch.images[:1]).shape[1]
            cache = self._caches[dataset, kind] = self._open_cache(dataset, kind, width)
        rows, missing = cache.read(indices)
        if missing:
            computed = compute(batch.images[missing]).cpu().numpy()
            rows[missing] = cache.write([indices[i] for i in missing], computed)
        return copy_to_device(torch.from_numpy(rows), self.device).float()

    def _open_cache(self, name: str, kind: str, width: int) -> OutputCache:
        """Open the cache of a dataset. Its name is a hash of all that the outputs depend on."""
        dataset, digest = self._datasets[name], hashlib.sha256()
        precision = str(torch.get_autocast_dtype(self.device.type))
        if not torch.is_autocast_enabled(self.device.type):
            precision = "full"
        source = self.source
        described = [kind, precision, self.cache_key, str(self.image_size), fingerprint(dataset)]
        described += [str(list(source.mean)), str(list(source.std))]
        described += [str(self.network), str(getattr(self.network, "settings", ""))]
        for text in [*described, *image_digests(dataset)]:
            digest.update(text.encode() + b"\0")
        for key, value in sorted(self.network.state_dict().items()):
            digest.update(key.encode())
            digest.update(np.ascontiguousarray(value.detach().cpu().float()).tobytes())
        assert self.cache is not None
        cache = OutputCache(self.cache, digest.hexdigest()[:16], len(dataset), width)
        count, number = int((cache.sums != 0).sum()), len(dataset)
        where = name or "the training set"
        log.info("outputs of the teacher for %s in %s: %d of %d", where, self.cache, count, number)
        return cache
