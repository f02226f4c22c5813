"""Performer attention: the softmax is replaced by a product of positive random features (FAVOR+).

Source: Rethinking Attention with Performers, arXiv:2009.14794, section 2 (positive orthogonal
features), as in the 2021 reference.

Letters: B images, N heads, D channels of a head, C = N*D, X Y grid, L = X*Y local tokens, G global
tokens, T = G+L, f features.
"""

import random

import torch
from torch import Tensor, nn

from vil.layers.attention.base import Attention, real_tokens
from vil.utils.precision import autocast_off
from vil.utils.train_step import TrainStep

EPS = 1e-4  # added to each feature, so that no token is without weight


class PerformerAttention(Attention):
    """Every token attends to every token, at a cost that grows with T instead of T squared.

    num_features: f.
    batch_max: the features of keys are kept in range by the maximum over the whole batch, as in the
    2021 reference: an image's result then depends on the others. Else by each image's own.
    In training the features are drawn anew now and then, see `set_progress`. There is no matrix of
    weights, so attn_drop has no effect.
    """

    has_relative_bias = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_features: int,
        batch_max: bool = False,
        num_global: int = 1,
        grid: tuple[int, int] | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__(dim, num_heads, num_global, attn_drop, proj_drop)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.fast_attention = RandomFeatureAttention(dim // num_heads, num_features, batch_max)
        self.drawn: tuple[int, int, int] | None = None  # seed, index and step of the last redraw

    def forward(self, x: Tensor, grid: tuple[int, int], valid: Tensor | None = None) -> Tensor:
        """x (B, G+L, C), global tokens first; valid (B, 2) real rows and columns -> (B, G+L, C)."""
        q, k, v = self.split_parts(self.qkv(x), 3)  # (B, N, T, D) each
        real = None if valid is None else real_tokens(valid, grid, self.num_global)
        return self.proj_drop(self.proj(self.merge_heads(self.fast_attention(q, k, v, real))))

    def set_progress(self, progress: TrainStep, index: int) -> None:
        """Draw new features if the step asks for it; never in evaluation, nor when frozen.

        In epoch e every 1 + 5e steps, from the first step of the epoch on. The draw is a function
        of (seed, module, step of the last redraw), so ranks and resumed runs agree.
        """
        if not (self.training and self.qkv.weight.requires_grad):
            return
        start, period = progress.epoch * progress.steps_per_epoch, 1 + 5 * progress.epoch
        last = start + (progress.step - start) // period * period
        key = (progress.seed, index, last)
        if key != self.drawn:
            seed = random.Random("performer features {} {} {}".format(*key)).getrandbits(63)
            self.fast_attention.redraw(torch.Generator("cpu").manual_seed(seed))
            self.drawn = key

    def macs(self, grid: tuple[int, int]) -> int:
        """The linears; features of q and k, their products with v, and the normalisation."""
        tokens = self.num_global + grid[0] * grid[1]
        features = tokens * self.fast_attention.num_features
        return 4 * tokens * self.dim**2 + features * (4 * self.dim + self.num_heads)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, num_features={self.fast_attention.num_features}, "
            f"batch_max={self.fast_attention.batch_max}"
        )


class RandomFeatureAttention(nn.Module):
    """Attention through random features, one matrix of which serves all heads.

    projection_matrix (f, D) is a buffer that is saved with the weights: results depend on it.
    """

    def __init__(self, head_dim: int, num_features: int, batch_max: bool) -> None:
        super().__init__()
        self.num_features, self.batch_max = num_features, batch_max
        self.register_buffer("projection_matrix", torch.empty(num_features, head_dim))
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Fill the matrix with a new draw, torch's global generator by default."""
        with torch.no_grad():
            draw = orthogonal_gaussian(*self.projection_matrix.shape, generator)
            self.projection_matrix.copy_(draw.to(self.projection_matrix.dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """q, k, v (B, N, T, D), real (B, T) bool: the keys that exist -> (B, N, T, D).

        Computed in float32 (float64 for float64), under autocast too: the features span the range
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
        """(B, N, T, D) -> (B, N, T, f), zero for keys that do not exist."""
        projected, square = self._project(k)
        # padding is masked before exp too: its overflow would turn gradients into NaN
        padding = None if real is None else ~real[:, None, :, None]
        if padding is not None:
            projected = projected.masked_fill(padding, -torch.inf)
        axes = (0, 1, 2, 3) if self.batch_max else (1, 2, 3)
        features = torch.exp(projected - square - projected.amax(axes, keepdim=True)) + EPS
        return features if padding is None else features.masked_fill(padding, 0.0)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, N, T, D), scaled by D^-1/4 -> its products with the matrix, and |x|^2 / 2.

        The paper's factor f^-1/2 of all features cancels in the normalisation.
        """
        x = x * x.shape[-1] ** -0.25
        return x @ self.projection_matrix.to(x.dtype).mT, x.square().sum(-1, keepdim=True) / 2


def orthogonal_gaussian(count: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """(count, dim) rows, each a Gaussian vector, orthogonal within every block of `dim`.

    arXiv:2009.14794, section 2.4: directions from random orthogonal matrices, lengths from
    independent Gaussian vectors. The sign correction makes the Q of a Gaussian matrix uniformly
    distributed. Drawn on the CPU in float64, so that every device gets the same.
    """
    common = dict(generator=generator, dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(torch.randn(-(-count // dim), dim, dim, **common))
    directions = (q * r.diagonal(dim1=1, dim2=2).sign()[:, None]).flatten(0, 1)
    return directions[:count] * torch.randn(count, dim, **common).norm(dim=1, keepdim=True)
