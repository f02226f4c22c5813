"""Performer attention: the softmax kernel approximated by positive random features (FAVOR+).

Source: Rethinking Attention with Performers, arXiv:2009.14794, section 2 (positive orthogonal
features), as in the 2021 reference.

Shapes: B batch, N heads, D head dim, C = N*D, X Y grid, L = X*Y local tokens, G global tokens,
T = G+L, f random features.
"""

import random

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention, AttentionWeights
from vil.layers.padding import Grid, Valid
from vil.utils.precision import autocast_off
from vil.utils.train_step import TrainStep

EPS = 1e-4  # added to each feature, so that every token has a positive weight


class PerformerAttention(Attention):
    """Every token attends to every token, at a cost linear in T.

    num_features: f.
    batch_max: stabilize the features of keys by their maximum over the batch, as in the 2021
    reference, so that the result of an image depends on the others. If False by the maximum over
    the image.

    Redraws the features during training, see `set_progress`. attn_drop has no effect: the weights
    are never computed.
    """

    has_relative_bias = False

    def __init__(
        self, dim: int, num_heads: int, *, num_features: int, batch_max: bool = False, **common
    ) -> None:
        super().__init__(dim, num_heads, **common)
        self.qkv = self.linear(3)
        self.proj = nn.Linear(dim, dim)
        self.fast_attention = RandomFeatureAttention(dim // num_heads, num_features, batch_max)
        self.last_redraw: tuple[int, int, int] | None = None  # seed, index and step

    def forward(self, x: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """x (B, G+L, C), global tokens first -> (B, G+L, C)."""
        q, k, v = self.split_parts(self.qkv(x), 3)  # (B, N, T, D) each
        real = self.real_tokens(valid_hw, grid)
        return self.proj_drop(self.proj(self.merge_heads(self.fast_attention(q, k, v, real))))

    def set_progress(self, progress: TrainStep, index: int) -> None:
        """Redraw the features if the step requires it; never in evaluation or if frozen.

        In epoch e, redraw every 1 + 5e steps, starting with the first step of the epoch. The draw
        is a function of (seed, module, step of the last redraw), so that ranks and resumed runs
        agree.
        """
        if not (self.training and self.qkv.weight.requires_grad):
            return
        start, period = progress.epoch * progress.steps_per_epoch, 1 + 5 * progress.epoch
        last = start + (progress.step - start) // period * period
        key = (progress.seed, index, last)
        if key != self.last_redraw:
            seed = random.Random("performer features {} {} {}".format(*key)).getrandbits(63)
            self.fast_attention.redraw(torch.Generator("cpu").manual_seed(seed))
            self.last_redraw = key

    def attention_weights(
        self, x: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid = None
    ) -> AttentionWeights:
        """The normalized products of random features. See `Attention.attention_weights`."""
        q, k, _ = self.split_parts(self.qkv(x), 3)
        kernel = self.fast_attention
        real = self.real_tokens(valid_hw, grid)
        dtype = torch.promote_types(q.dtype, torch.float32)
        query_features = kernel.query_features(q[:, :, queries].to(dtype))
        weights = query_features @ kernel.key_features(k.to(dtype), real).mT
        weights = weights / weights.sum(-1, keepdim=True)
        return AttentionWeights(weights, self.num_global, grid, grid)

    def changed_since_2021(self) -> str | None:
        """The maximum over the batch."""
        if self.fast_attention.batch_max:
            return None
        return (
            "the 2021 performer used the maximum of keys over the batch: batch_max=True "
            "(PERFORMER_BATCH_MAX) reproduces its results"
        )

    def macs(self, grid: Grid) -> int:
        """The linear layers, the features of q and k, their products with v, the normalization."""
        tokens = self.num_global + grid[0] * grid[1]
        features = tokens * self.fast_attention.num_features
        return 4 * tokens * self.dim**2 + features * (4 * self.dim + self.num_heads)


class RandomFeatureAttention(nn.Module):
    """Linear attention by random features, with one persistent projection (f, D) of all heads."""

    def __init__(self, head_dim: int, num_features: int, batch_max: bool) -> None:
        super().__init__()
        self.num_features, self.batch_max = num_features, batch_max
        self.register_buffer("projection_matrix", torch.empty(num_features, head_dim))
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Sample a new projection, by default with torch's global generator."""
        with torch.no_grad():
            draw = orthogonal_gaussian(*self.projection_matrix.shape, generator)
            self.projection_matrix.copy_(draw.to(self.projection_matrix.dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """q, k, v (B, N, T, D), real (B, T) bool: keys that are not padding -> (B, N, T, D).

        Computes in float32 (float64 for float64), also under autocast: the features span the range
        of an exponential.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        with autocast_off(q.device.type):
            q, k = self.query_features(q.to(dtype)), self.key_features(k.to(dtype), real)
            values = q @ (k.mT @ v.to(dtype))
            total = q @ k.sum(2)[..., None]
        return (values / total).to(v.dtype)

    def query_features(self, q: Tensor) -> Tensor:
        """(B, N, T, D) -> (B, N, T, f)."""
        projected, square = self._project(q)
        return torch.exp(projected - square - projected.amax(-1, keepdim=True)) + EPS

    def key_features(self, k: Tensor, real: Tensor | None) -> Tensor:
        """(B, N, T, D) -> (B, N, T, f), zero for padding."""
        projected, square = self._project(k)
        # mask padding before exp too: its overflow would make gradients NaN
        padding = None if real is None else ~real[:, None, :, None]
        if padding is not None:
            projected = projected.masked_fill(padding, -torch.inf)
        axes = (0, 1, 2, 3) if self.batch_max else (1, 2, 3)
        features = torch.exp(projected - square - projected.amax(axes, keepdim=True)) + EPS
        return features if padding is None else features.masked_fill(padding, 0.0)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale x (B, N, T, D) by D^-1/4 -> x @ projection^T (B, N, T, f), |x|^2 / 2 (B, N, T, 1).

        The paper's factor f^-1/2 of all features cancels in the normalization.
        """
        x = x * x.shape[-1] ** -0.25
        return x @ self.projection_matrix.to(x.dtype).mT, x.square().sum(-1, keepdim=True) / 2

    def extra_repr(self) -> str:
        return f"num_features={self.num_features}, batch_max={self.batch_max}"


def orthogonal_gaussian(count: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """(count, dim): rows of Gaussian vectors, orthogonal within each block of `dim` rows.

    arXiv:2009.14794, section 2.4: directions from random orthogonal matrices, lengths from
    independent Gaussian vectors. The sign correction makes the Q of a Gaussian matrix uniformly
    distributed. Sampled on the CPU in float64, so that all devices get the same values.
    """
    common = dict(generator=generator, dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(torch.randn(-(-count // dim), dim, dim, **common))
    directions = (q * r.diagonal(dim1=1, dim2=2).sign()[:, None]).flatten(0, 1)
    return directions[:count] * torch.randn(count, dim, **common).norm(dim=1, keepdim=True)
