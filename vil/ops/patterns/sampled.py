"""Patterns whose query-key pairs are a random sample.

A hash of (seed, query, key) gives each pair a random number. Any part of the mask can thus be
computed alone, and is the same on every machine.

Pairs are sampled without replacement, with probabilities proportional to their weights. Each pair
has a random arrival time, which is exponentially distributed with the weight as its rate. The first
pairs to arrive are the sample (Efraimidis and Spirakis, Weighted random sampling with a reservoir,
2006).

In grids of up to EXACT_TOKENS tokens, the sample has exactly the requested number of pairs. In
larger grids, it has this size only on average.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import torch
from torch import Tensor

from vil.ops.patterns.base import Grid, Pairs, Pattern

EXACT_TOKENS = 8192
PAIRS_AT_ONCE = 1 << 20
BIN_SHIFT = 48  # leaves the sign, the exponent and four bits of the mantissa of a float64
BINS = 1 << 15
NEWTON_STEPS, PRECISION, BISECTIONS = 101, 1e-9, 40
LATEST = sys.float_info.max  # a time at which almost all pairs of nonzero weight have arrived
SAMPLED_QUERIES = 1024  # queries from which the number of arrivals in larger grids is estimated
Weights = Callable[[Pairs], Tensor]
# constants of SplitMix64 (Steele, Lea and Flood, 2014)
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random(density: float, seed: int = 0) -> "Sampled":
    """Return a pattern of keys sampled with equal probability (Big Bird, arXiv:2007.14062).

    density: fraction of all query-key pairs of a grid that are sampled, above 0 and at most 1.
    seed: random seed.
    Raises ValueError for a density out of range.
    """
    return Sampled(Uniform(), density, seed, f"random:{density},{seed}")


def gaussian(sigma: float, density: float, seed: int = 0) -> "Sampled":
    """Return a pattern of sampled keys. Sampling weights are a Gaussian function of the distance.

    sigma: standard deviation of the Gaussian in tokens, above 0.
    density: fraction of all query-key pairs of a grid to sample, above 0 and at most 1.
    Raises ValueError if sigma or density is out of range.
    """
    if not isinstance(sigma, int | float) or not sigma > 0:
        raise ValueError(f"gaussian: sigma must be above 0, got {sigma!r}")
    return Sampled(Gaussian(sigma), density, seed, f"gaussian:{sigma},{density},{seed}")


def probability(weights: Weights, density: float, seed: int = 0) -> "Sampled":
    """Return a pattern of keys sampled with custom weights.

    weights: function from `Pairs` to their sampling weights, a nonnegative tensor that broadcasts
    to the pairs.
    density: fraction of all query-key pairs of a grid to sample, above 0 and at most 1.
    """
    return Sampled(weights, density, seed, "")


@dataclass(frozen=True)
class Uniform:
    """A function that gives all pairs the same sampling weight."""

    def __call__(self, pairs: Pairs) -> Tensor:
        return torch.ones(())


@dataclass(frozen=True)
class Gaussian:
    """A function that gives pairs a sampling weight that decreases with their distance.

    sigma: standard deviation of the Gaussian, in tokens.
    """

    sigma: float

    def __call__(self, pairs: Pairs) -> Tensor:
        squared = (pairs.rows**2 + pairs.cols**2).double()
        return torch.exp(squared / (-2 * self.sigma**2))


@dataclass(frozen=True)
class Sampled(Pattern):
    """A pattern whose visible pairs are a random sample of all query-key pairs.

    weights: function from `Pairs` to their sampling weights.
    fraction: fraction of pairs to sample.
    seed: from -2**63 to 2**63 - 1.
    text: the result of str(). If it is "", str() describes the other fields.
    """

    weights: Weights
    fraction: float
    seed: int
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.fraction, int | float) or not 0 < self.fraction <= 1:
            raise ValueError(f"the density must be above 0 and at most 1, got {self.fraction!r}")
        if not isinstance(self.seed, Integral) or not -(2**63) <= self.seed < 2**63:
            raise ValueError(
                f"the seed must be a whole number from -2**63 to 2**63 - 1, got {self.seed!r}"
            )

    def visible(self, pairs: Pairs) -> Tensor:
        return self.arrival(pairs) <= _last_arrival(self, pairs.grid)

    def arrival(self, pairs: Pairs) -> Tensor:
        """Return a random arrival time for each pair, float64. The earliest pairs are the sample.

        Times are exponentially distributed. The rate of a pair is its sampling weight, so a pair of
        weight 0 never arrives (infinity).
        """
        weight = self.weights(pairs).double()
        return -torch.log(uniform(self.seed, pairs.query, pairs.key)) / weight

    def __str__(self) -> str:
        return self.text or f"probability:{self.weights},{self.fraction},{self.seed}"


def uniform(seed: int, query: Tensor, key: Tensor) -> Tensor:
    """Return a uniform random number in (0, 1) for each pair of token indices, float64."""
    x = mix(mix(torch.tensor(seed) + query) + key)
    return ((x >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)


def mix(x: Tensor) -> Tensor:
    """Hash each int64 number with SplitMix64. Integer overflow is intended."""
    x = x + _signed(GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(FIRST)
    x = (x ^ _shift_right(x, 27)) * _signed(SECOND)
    return x ^ _shift_right(x, 31)


def _signed(number: int) -> int:
    """Reinterpret an unsigned 64-bit integer of at least 2**63 as int64."""
    return number - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logically shift int64 numbers right, so that zeros are shifted in instead of the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=256)
def _last_arrival(pattern: Sampled, grid: Grid) -> float:
    """Return the arrival time of the last pair in the sample (see `Sampled.arrival`)."""
    length = math.prod(grid)
    wanted = max(1, round(pattern.fraction * length**2))
    if length <= EXACT_TOKENS:
        return _exact_arrival(pattern, grid, wanted)
    return _expected_arrival(pattern, grid, wanted / length**2)


def _exact_arrival(pattern: Sampled, grid: Grid, wanted: int) -> float:
    """Return the time up to which exactly `wanted` pairs arrive (see `Sampled.arrival`).

    Raises ValueError if fewer than `wanted` pairs have a weight above 0.
    """
    times = (pattern.arrival(pairs).flatten() for pairs in _all(grid))
    # a histogram of the arrival times, to find the bin with the last sampled pair
    counts = torch.zeros(BINS, dtype=torch.int64)
    for time in times:
        counts += _bins(time).bincount(minlength=BINS)
    total = counts.cumsum(0)
    last = int((total < wanted).sum())
    if last == _bins(torch.tensor(math.inf, dtype=torch.float64)):
        raise ValueError(
            f"{pattern}: cannot sample {wanted} pairs of a grid of {grid[0]} x {grid[1]} tokens, "
            f"because only {int(total[last - 1])} have a weight above 0: use a lower density"
        )
    times = (pattern.arrival(pairs).flatten() for pairs in _all(grid))
    # the times in this bin, to find the time of that pair
    of_bin = torch.cat([time[_bins(time) == last] for time in times])
    return of_bin.kthvalue(wanted - int(total[last] - counts[last])).values.item()


def _bins(time: Tensor) -> Tensor:
    """Return the index of the histogram bin of each arrival time.

    The index is the time's leading bits, read as an integer. Later times never have smaller
    indices, because the bits of positive floats have the same order as the floats.
    """
    return (time.view(torch.int64) >> BIN_SHIFT).clamp(min=0)


def _expected_arrival(pattern: Sampled, grid: Grid, density: float) -> float:
    """Return the time up to which a fraction `density` of all pairs is expected to arrive.

    `Sampled.arrival` defines the arrival times. The expectation is estimated from a part of the
    queries.
    """
    step = max(1, math.prod(grid) // SAMPLED_QUERIES)
    weights = torch.cat([_weights(pattern, pairs) for pairs in _all(grid, step)])
    if (weights > 0).double().mean().item() <= density:
        return LATEST
    time = 0.0
    # Newton's method does not overshoot, because the expected fraction is concave in time
    for _ in range(NEWTON_STEPS):
        waiting = torch.exp(-time * weights)  # probability that a pair has not arrived
        missing = density - (1 - waiting.mean().item())
        slope = (weights * waiting).mean().item()
        if not abs(missing) < slope * LATEST:  # the next time would not be finite
            break
        time += missing / slope
        if missing <= density * PRECISION:
            return time
    return _bisect(weights, density)  # the weights differ by many orders of magnitude


def _bisect(weights: Tensor, density: float) -> float:
    """Compute the result of `_expected_arrival` by bisection on a logarithmic scale.

    weights: flat tensor with the sampling weights of the pairs. The result is at most LATEST.
    """
    early, late = sys.float_info.min, LATEST
    for _ in range(BISECTIONS):
        time = math.sqrt(early) * math.sqrt(late)
        if 1 - torch.exp(-time * weights).mean().item() < density:
            early = time
        else:
            late = time
    return late


def _weights(pattern: Sampled, pairs: Pairs) -> Tensor:
    """Return the sampling weights of pairs as a flat tensor, float64."""
    shape = torch.broadcast_shapes(pairs.query.shape, pairs.key.shape)
    return pattern.weights(pairs).double().expand(shape).flatten()


def _all(grid: Grid, step: int = 1) -> Iterator[Pairs]:
    """Yield the pairs of every `step`-th query with all keys, in batches of a few queries."""
    length = math.prod(grid)
    keys = torch.arange(length)
    for queries in torch.arange(0, length, step).split(max(1, PAIRS_AT_ONCE // length)):
        yield Pairs.of_tokens(grid, queries[:, None], keys)
