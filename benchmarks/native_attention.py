"""Compare the time of the compiled CPU backend, and of others, with the time of their matmuls.

  python benchmarks/native_attention.py
  python benchmarks/native_attention.py --backends native blocked masked --rounds 15 --json FILE

The floor is a lower bound: the time of the matmuls alone, over all pairs of a query chunk and a key
chunk that it attends to. There are two matmuls in the forward pass, and seven in both passes. Their
rate is the highest FLOP/s that a matmul, an nn.Linear or oneDNN's packed linear layer of size 2048
reaches in the same rounds. Backends run in interleaved rounds, and times are medians. On a busy
machine, use --cpu-time and --threads 1, which measure processor time. MiB is the peak of the
tensors that both passes allocate.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from shared import CPU, MIB, RESULTS, add_json, make_parser, write_json

from vil.layers.packed_linear import PackedLinear
from vil.ops import BACKENDS, Case, Window
from vil.ops.custom_op import num_pairs
from vil.ops.testing import forward, leaves_of, make_inputs
from vil.utils.machine import machine
from vil.utils.timing import peak_tensor_bytes

SIDE = 2048  # side of the matrices whose matmul measures the peak FLOP/s
SHAPES = {  # {name: (grid side, chunk side, images, heads, head dim)}
    "56x56 w8 B2 N12 D64": (56, 8, 2, 12, 64),
    "56x56 w7 B16 N1 D48": (56, 7, 16, 1, 48),
    "28x28 w7 B16 N3 D32": (28, 7, 16, 3, 32),
    "14x14 w7 B16 N3 D32": (14, 7, 16, 3, 32),
}
BASE = "blocked"  # the backend to compare with


def measure(
    case: Case, names: list[str], rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, list[float]], dict[str, float], float]:
    """Measure backends on an attention call. Returns ({backend: [seconds of the forward pass,
    seconds of both passes]}, {backend: peak MiB of tensors in both passes}, peak FLOP/s).

    clock: function that returns the current time in seconds.
    """
    inputs = make_inputs(case)
    leaves, cotangent = leaves_of(inputs), inputs.cotangent
    a, b = torch.randn(2, SIDE, SIDE, dtype=case.dtype)
    linear = torch.nn.Linear(SIDE, SIDE, bias=False, dtype=case.dtype).requires_grad_(False)
    packed = PackedLinear(linear)

    def step(name: str) -> tuple[float, float]:
        start = clock()
        out = forward(BACKENDS[name].attend, case, inputs, leaves)
        middle = clock()
        torch.autograd.grad(out, list(leaves.values()), cotangent)
        return middle - start, clock() - start

    times, peak = {name: [] for name in names}, 0.0
    for number in range(rounds + 2):
        for name in names:
            seconds = step(name)
            if number > 1:  # the first rounds compile and warm up
                times[name].append(seconds)
        for multiply in (lambda: a @ b, lambda: linear(a), lambda: packed(a)):
            start = clock()
            multiply()
            peak = max(peak, 2 * SIDE**3 / (clock() - start))
    seconds = {name: [median(passes) for passes in zip(*rows)] for name, rows in times.items()}
    return (
        seconds,
        {name: peak_tensor_bytes(partial(step, name), CPU) / MIB for name in names},
        peak,
    )


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    about, rows = machine(CPU), []
    print(f"{about['name']}, {args.threads} threads, torch {about['torch']}, {args.rounds} rounds")
    for dtype in args.dtypes:
        for shape in args.shapes:
            grid, size, *sizes = SHAPES[shape]
            window = Window((grid, grid), size)
            case = Case(window, *sizes, 1, getattr(torch, dtype), table_bias=True, global_bias=True)
            names = [name for name in args.backends if not BACKENDS[name].reasons_against(case)]
            times, memory, peak = measure(case, names, args.rounds, clock)
            pairs = sizes[0] * sizes[1] * sizes[2] * num_pairs(window, case.num_global)
            floors = [2 * matmuls * pairs / peak for matmuls in (2, 7)]
            result = dict(peak=peak, floors=floors, seconds=times, MiB=memory)
            rows.append(dict(shape=shape, dtype=dtype, **result))
            print(f"\n{shape} {dtype}, peak {peak / 1e9:.0f} GFLOP/s: ms, over floor, x {BASE}")
            for name, seconds in times.items():
                cells = [
                    f"{1e3 * t:8.2f} {t / floor:5.2f}"
                    + (f" {base / t:5.2f}" if BASE in times else "")
                    for t, floor, base in zip(seconds, floors, times.get(BASE, seconds))
                ]
                both = f"forward {cells[0]}   with backward {cells[1]}"
                print(f"  {name:15} {both}  {memory[name]:7.1f} MiB", flush=True)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    write_json(args.json, {"machine": about, "settings": settings, "rows": rows})


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=["native", BASE])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time")
    add_json(parser, RESULTS / "native-attention-cpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    run(parse())
