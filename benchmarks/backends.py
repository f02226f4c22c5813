"""Which backend of local attention is fastest where: forward and backward together, all in turns.

  python benchmarks/backends.py
  python benchmarks/backends.py --dtype bfloat16 --rounds 15

One line per shape: the time of every backend over that of chunk_handgrad, and the one that `auto`
takes. sdpa is torch's full attention without bias, on shapes where its scores are few enough. Bias
and one global token throughout. Medians; the machine's speed may swing, so only ratios are shown.
"""

import argparse
import platform
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops import BACKENDS, Case, LocalBias, Window, choose, local_attention
from vil.utils.timing import seconds

# B, N, D, side of the grid, w: stages of small models, of ViL at 224 px, and the paper's figure
SHAPES = [
    (32, 1, 32, 16, 4), (32, 2, 32, 8, 3), (8, 3, 32, 14, 7), (32, 3, 32, 20, 7), (8, 3, 32, 28, 7),
    (2, 3, 32, 28, 4), (16, 3, 32, 56, 7), (2, 12, 64, 56, 8), (2, 3, 32, 96, 4),
    (2, 3, 32, 40, 15),
]  # fmt: skip
NAMES = ("masked", "chunk_autograd", "chunk_handgrad", "gathered", "blocked")
MOST_SCORES = 3e8  # of full attention and masked: more take minutes
BASE = "chunk_handgrad"


def candidates(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """{name: one forward and backward}."""
    batch, heads, dim, side, size = shape
    length, device = side * side, torch.device("cpu")
    q, k, v = (
        torch.randn(batch, heads, n, dim, dtype=dtype, device=device, requires_grad=True)
        for n in (length, length + 1, length + 1)
    )
    table = torch.randn(heads, (4 * size - 1) ** 2, requires_grad=True)
    bias = LocalBias(table, torch.randn(heads, 1, requires_grad=True))
    window = Window((side, side), size)

    def local(name: str) -> None:
        out = local_attention(q, k, v, window, num_global=1, bias=bias, backend=name)
        differentiate(out, [q, k, v, *bias])

    found = {name: lambda name=name: local(name) for name in NAMES}
    found["sdpa"] = lambda: differentiate(F.scaled_dot_product_attention(q, k, v), [q, k, v])
    few = batch * heads * length**2 <= MOST_SCORES
    return {name: run for name, run in found.items() if few or name not in ("masked", "sdpa")}


def differentiate(out: Tensor, leaves: list[Tensor]) -> None:
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def run(args: argparse.Namespace) -> None:
    dtype, device = getattr(torch, args.dtype), torch.device("cpu")
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{args.dtype}, time over {BASE}'s\n")
    print(f"{'B, N, D, side, w':22}", *(f"{name:>14}" for name in (*NAMES, "sdpa")), " auto")
    for shape in SHAPES:
        runs = candidates(shape, dtype)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(args.rounds + 1):
            for name, one in runs.items():
                elapsed = seconds(one, device)
                times[name] += [elapsed] if turn else []  # the first turn warms up
        medians = {name: statistics.median(found) for name, found in times.items()}
        batch, heads, dim, side, size = shape
        case = Case(Window((side, side), size), batch, heads, dim, 1, dtype, table_bias=True)
        ratios = (medians.get(name, float("nan")) / medians[BASE] for name in (*NAMES, "sdpa"))
        shown = (f"{ratio:14.2f}" for ratio in ratios)
        print(f"{shape!s:22}", *shown, f" {choose(case)}", flush=True)


if __name__ == "__main__":
    assert set(NAMES) <= set(BACKENDS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    run(parser.parse_args())
