"""Time attention and models on request, in a process that compare_editions.py starts.

  OMP_NUM_THREADS=1 .venv/bin/python benchmarks/edition_worker.py

Reads the names of measures from stdin, one per line, and prints the seconds of one call of each.
Both checkouts of a comparison run this file with their own Python. It therefore uses only
`vil.get_model` and `vil.ops`, which both have.
"""

import functools
import os
import sys
import time
from collections.abc import Callable

import torch

import vil
from vil.ops import LocalBias, Window, local_attention


def attention(
    batch: int, heads: int, dim: int, side: int, size: int, *, calls: int = 1
) -> Callable[[], None]:
    """Return a function that runs forward and backward of local attention `calls` times.

    The attention has one global token, and biases between local tokens and to the global token.
    batch: images. dim: head dim. side: side of the grid in tokens. size: side of a chunk.
    """
    torch.manual_seed(0)
    tokens = side * side
    q = torch.randn(batch, heads, tokens, dim, requires_grad=True)
    k, v = (torch.randn(batch, heads, 1 + tokens, dim, requires_grad=True) for _ in range(2))
    table = torch.randn(heads, (4 * size - 1) ** 2, requires_grad=True)
    to_global = torch.randn(heads, 1, requires_grad=True)
    window, weight = Window((side, side), size), torch.randn(batch, heads, tokens, dim)

    def step() -> None:
        for _ in range(calls):
            bias = LocalBias(table, to_global)
            (local_attention(q, k, v, window, num_global=1, bias=bias) * weight).sum().backward()

    return step


def model_step(training: bool, batch: int = 8) -> Callable[[], object]:
    """Return a function that runs a step of vil_tiny at 224 px: forward, backward and AdamW if
    `training`, otherwise only forward."""
    torch.manual_seed(0)
    model = vil.get_model("vil_tiny", img_size=224).train(training)
    images, targets = torch.randn(batch, 3, 224, 224), torch.arange(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()

    return step if training else torch.inference_mode()(lambda: model(images))


IN_PROCESS = {
    "attention 56x56 w8 B2 N12 D64": lambda: attention(2, 12, 64, 56, 8),
    "attention 56x56 w7 B8 N3 D32": lambda: attention(8, 3, 32, 56, 7),
    "attention 14x14 w7 B2 N3 D32, x20": lambda: attention(2, 3, 32, 14, 7, calls=20),
    "vil_tiny training step": lambda: model_step(training=True),
    "vil_tiny evaluation step": lambda: model_step(training=False),
}


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    build = functools.cache(lambda name: IN_PROCESS[name]())
    for line in sys.stdin:
        step = build(line.strip())
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
