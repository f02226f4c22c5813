"""Performer attention: softmax attention approximated by positive random features (FAVOR+).

Source: Rethinking Attention with Performers, arXiv:2009.14794, section 2. This file follows the
original Vision Longformer code of 2021.

Shapes: B batch, N heads, D head dim, C = N*D, L local tokens, G global tokens, T = G+L, f random
features.
"""

import random
from typing import Any

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention, AttentionWeights
from vil.layers.linear import apply_linear
from vil.layers.padding import Grid, Valid
from vil.utils.lookup import lookup
from vil.utils.precision import autocast_off
from vil.utils.train_step import TrainStep

BATCH_MAX = dict.fromkeys(("auto", "true", "false"))
EPS = 1e-4  # added to each feature, so that every token has a positive weight


class PerformerAttention(Attention):
    """Approximate softmax attention of every token to all tokens, at a cost linear in their number.

    num_features: number of random features per query or key.
    batch_max: subtract the maximum of the batch, not of each image, from the exponents of keys, as
    in the original Vision Longformer code. The output for an image then depends on the other
    images. "auto": True with weights of that code, else False.

    The features are redrawn during training, see `set_progress`. attn_drop has no effect.
    """

    has_relative_bias = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_features: int,
        batch_max: bool | str = "auto",
        **common,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        batch_max = str(batch_max).lower()
        lookup(BATCH_MAX, batch_max, "batch_max")
        self.qkv = self.linear(3)
        self.proj = nn.Linear(dim, dim)
        self.is_open = batch_max == "auto"
        self.fast_attention = RandomFeatureAttention(
            dim // num_heads, num_features, batch_max=batch_max == "true"
        )
        self.last_redraw: tuple[int, int, int] | None = None  # seed, index and step

    def forward(self, x: Tensor, grid: Grid, valid_hw: Valid = None) -> Tensor:
        """Apply attention to x (B, G+L, C): G global tokens, then the L local tokens of the grid.

        valid_hw (B, 2): unpadded rows and columns of each image. Returns x's shape.
        """
        x = self.hide_padding(x, valid_hw, grid)
        q, k, v = self.split_parts(apply_linear(self.qkv, x), 3)  # (B, N, T, D) each
        real = self.real_tokens(valid_hw, grid)
        out = self.merge_heads(self.fast_attention(q, k, v, real))
        return self.proj_drop(apply_linear(self.proj, out))

    def set_progress(self, progress: TrainStep, index: int) -> None:
        """Redraw the random features if the schedule requires it at this training step.

        In epoch e, they are redrawn every 1 + 5e steps, starting with the first step of the epoch.
        All ranks and resumed runs draw the same features. index: position of this module among the
        model's attention modules.
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
        """Return the attention weights of the given queries, computed from their random features.

        See `Attention.attention_weights`.
        """
        q, k, _ = self.split_parts(self.qkv(x), 3)
        kernel = self.fast_attention
        real = self.real_tokens(valid_hw, grid)
        dtype = torch.promote_types(q.dtype, torch.float32)
        query_features = kernel.query_features(q[:, :, queries].to(dtype))
        weights = query_features @ kernel.key_features(k.to(dtype), real).mT
        weights = weights / weights.sum(-1, keepdim=True)
        return AttentionWeights(weights, self.num_global, grid, grid)

    def use_2021_rule(self) -> dict[str, Any]:
        if not self.is_open:
            return {}
        self.fast_attention.batch_max, self.is_open = True, False
        return {"batch_max": True}

    def macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates for one image: projections, random features, attention."""
        tokens = self.num_global + grid[0] * grid[1]
        features = tokens * self.fast_attention.num_features
        return 4 * tokens * self.dim**2 + features * (4 * self.dim + self.num_heads)


class RandomFeatureAttention(nn.Module):
    """Attention by random features, at a cost linear in the number of tokens.

    batch_max: subtract the maximum of the batch, not of each image, from the exponents of keys.

    All heads share one projection matrix (num_features, head_dim), a buffer in the state dict.
    """

    def __init__(self, head_dim: int, num_features: int, batch_max: bool) -> None:
        super().__init__()
        self.num_features, self.batch_max = num_features, batch_max
        self.register_buffer("projection_matrix", torch.empty(num_features, head_dim))
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Sample a new projection matrix.

        generator: a CPU generator; None for torch's global generator.
        """
        with torch.no_grad():
            draw = orthogonal_gaussian(*self.projection_matrix.shape, generator)
            self.projection_matrix.copy_(draw.to(self.projection_matrix.dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """Return the attention output (B, N, T, D) of q, k and v, which have the same shape.

        real (B, T) bool: True for keys that are not padding. The computation is in float32 or
        float64, even under autocast.
        """
        # the random features are exponentials, which have a wide range
        dtype = torch.promote_types(q.dtype, torch.float32)
        with autocast_off(q.device.type):
            q, k = self.query_features(q.to(dtype)), self.key_features(k.to(dtype), real)
            values = q @ (k.mT @ v.to(dtype))
            total = q @ k.sum(2)[..., None]
        return (values / total).to(v.dtype)

    def query_features(self, q: Tensor) -> Tensor:
        """Map queries (B, N, T, D) to random features (B, N, T, f)."""
        projected, square = self._project(q)
        return torch.exp(projected - square - projected.amax(-1, keepdim=True)) + EPS

    def key_features(self, k: Tensor, real: Tensor | None) -> Tensor:
        """Map keys (B, N, T, D) to random features (B, N, T, f). Features of padding are 0."""
        projected, square = self._project(k)
        # mask padding before exp too: its overflow would make gradients NaN
        padding = None if real is None else ~real[:, None, :, None]
        if padding is not None:
            projected = projected.masked_fill(padding, -torch.inf)
        axes = (0, 1, 2, 3) if self.batch_max else (1, 2, 3)
        features = torch.exp(projected - square - projected.amax(axes, keepdim=True)) + EPS
        return features if padding is None else features.masked_fill(padding, 0.0)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x @ projection^T, |x|^2 / 2), where x (B, N, T, D) is first scaled by D^-1/4.

        The shapes are (B, N, T, f) and (B, N, T, 1). The paper's factor f^-1/2 is omitted, because
        the normalization of attention cancels it.
        """
        x = x * x.shape[-1] ** -0.25
        return x @ self.projection_matrix.to(x.dtype).mT, x.square().sum(-1, keepdim=True) / 2

    def extra_repr(self) -> str:
        return f"num_features={self.num_features}, batch_max={self.batch_max}"


def orthogonal_gaussian(count: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Sample Gaussian vectors (count, dim) that are orthogonal in each group of `dim` vectors.

    Source: arXiv:2009.14794, section 2.4. Sampling runs on the CPU in float64, so that all devices
    get the same values.
    """
    common = dict(generator=generator, dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(torch.randn(-(-count // dim), dim, dim, **common))
    directions = (q * r.diagonal(dim1=1, dim2=2).sign()[:, None]).flatten(0, 1)
    return directions[:count] * torch.randn(count, dim, **common).norm(dim=1, keepdim=True)
