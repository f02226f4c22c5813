"""Measure what vil does on a CPU without tuning, and next to another program.

  python benchmarks/untuned.py             all parts, and benchmarks/results/untuned-cpu.json
                                           (untuned-cpu-amd.json: on a CPU of AMD)
  python benchmarks/untuned.py busy --rounds 15      some parts; writes no file

models  images per second of vil_tiny over deit_tiny, and of vil_small over swin_tiny: evaluation,
        training with AdamW, and both models optimized for inference; float32 and bfloat16
tuned   the speed without tuning, divided by the speed after it
busy    time while another process keeps one core busy, divided by the time alone: attention, and
        training steps; and of training steps next to the training of the same model

All measurements of a comparison are interleaved in rounds, and times are medians. The library is
compiled before. All models have 2 threads, random weights and no stochastic depth.
"""

# ruff: noqa: E402
from vil.utils.openmp import spin_briefly

spin_briefly()  # as the command line does

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from unittest import mock

import timm
import torch
import torch.nn.functional as F
from detection import CONFIG as DETECTION
from detection import example
from shared import CPU, RESULTS, add_json, make_parser, time_in_turns, write_json
from torch import nn

import vil
from vil.config import get_config
from vil.ops import BACKENDS, Case, Window
from vil.ops.dispatch import CHOICES
from vil.ops.linear_case import LinearCase
from vil.ops.testing import forward, leaves_of, make_inputs
from vil.ops.tuning import tuner
from vil.ops.tuning.linear_tuner import tune_linear
from vil.utils.machine import machine

THREADS, ROUNDS = 2, 9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAIRS = {  # {model: its competitor in timm}
    "vil_tiny": "deit_tiny_patch16_224",
    "vil_small": "swin_tiny_patch4_window7_224",
}
Run = Callable[[], object]
Ratios = Iterator[tuple[str, float]]


def create(name: str) -> nn.Module:
    torch.manual_seed(0)
    return vil.get_model(name) if name.startswith("vil_") else timm.create_model(name)


def make_evaluation(model: nn.Module, batch: int, dtype: torch.dtype, side: int = 224) -> Run:
    """Return a function that computes logits. bfloat16 is computed under autocast."""
    images = torch.randn(batch, 3, side, side)

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            model(images)

    return evaluate


def make_optimized(model: nn.Module, batch: int, dtype: torch.dtype) -> Run:
    """Return a function that computes logits with the model optimized for inference."""
    optimized = vil.optimize_for_inference(model.eval(), dtype=dtype)
    images = torch.randn(batch, 3, 224, 224)

    @torch.no_grad()
    def evaluate() -> None:
        optimized(images)

    return evaluate


def make_training(model: nn.Module, batch: int, dtype: torch.dtype, side: int = 224) -> Run:
    """Return a function that runs a training step with AdamW."""
    images, targets = torch.randn(batch, 3, side, side), torch.arange(batch) % 10
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model.train()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()

    return train


WAYS = {  # {name: (function that makes a measurement, images)}
    "evaluation": (make_evaluation, 16),
    "training": (make_training, 16),
    "optimized": (make_optimized, 16),
    "one image": (make_evaluation, 1),
    "one image, optimized": (make_optimized, 1),
}


def models(rounds: int) -> Ratios:
    """Compare models with competitors of their size."""
    for name, other in PAIRS.items():
        both = {each: create(each) for each in (name, other)}
        for (way, (make, batch)), (label, dtype) in (
            (way, dtype) for way in WAYS.items() for dtype in DTYPES.items()
        ):
            runs = {each: make(model, batch, dtype) for each, model in both.items()}
            times = {each: median(t) for each, t in time_in_turns(runs, rounds, CPU).items()}
            yield f"{name}, {way}, {label}: images per second", batch / times[name]
            yield f"{name}, {way}, {label}: over {other}", times[other] / times[name]


def find_cases(run: Run) -> list[Case | LinearCase]:
    """Return the calls of attention, linear layers and MLPs that a function makes."""
    cases: dict[Case | LinearCase, None] = {}

    def tuned(case: Case) -> None:
        cases[case] = None

    def by_rule(case: LinearCase) -> str:
        cases[case] = None
        return "native"

    rule = mock.patch("vil.ops.linear_case.by_rule", by_rule)
    apart = mock.patch("vil.layers.block.fused_block", return_value=None)  # layer by layer
    with mock.patch("vil.ops.dispatch.tuned", tuned), rule, apart:
        run()
    return list(cases)


def tune_all(run: Run) -> dict[str, str]:
    """Time the backends of all calls that a function makes. Returns CHOICES, and clears it."""
    for case in find_cases(run):
        if isinstance(case, LinearCase):
            if not case.unsupported():
                tune_linear(case)
        else:
            tuner.tune(case, [n for n in BACKENDS if n != "triton"], rounds=5)
    chosen = dict(CHOICES)
    CHOICES.clear()
    return chosen


def with_choices(choices: dict[str, str], run: Run) -> None:
    CHOICES.update(choices)
    try:
        run()
    finally:
        CHOICES.clear()


def make_detection() -> Run:
    """Return a function that runs a training step of Mask R-CNN on an image of 800 x 1216."""
    torch.manual_seed(0)
    model = vil.build_model(get_config(DETECTION, ["DEVICE=cpu"])).train()
    optimizer, (images, targets) = torch.optim.SGD(model.parameters(), 1e-4), example()

    def train() -> None:
        optimizer.zero_grad()
        torch.manual_seed(2)
        sum(model(images, targets).values()).backward()
        optimizer.step()

    return train


def make_runs() -> Iterator[tuple[str, Run]]:
    """Yield (name, function) for the comparison of `tuned`."""
    for name, batch, side in (("vil_nano", 32, 32), ("vil_tiny", 16, 224), ("vil_small", 8, 224)):
        config = "digits/vil_nano.yaml" if name == "vil_nano" else f"imagenet/{name}.yaml"
        torch.manual_seed(0)
        model = vil.build_model(get_config(config, ["DEVICE=cpu", "MODEL.VIT.DROP_PATH=0.0"]))
        for label, dtype in DTYPES.items():
            yield f"{name}, evaluation, {label}", make_evaluation(model, batch, dtype, side)
            yield f"{name}, training, {label}", make_training(model, batch, dtype, side)
    yield "Mask R-CNN, training, float32", make_detection()
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_dinov2", img_size=518, num_classes=10)
    model = vil.patch_attention(model, window=8)
    yield "patched ViT-S, 518 px, training, float32", make_training(model, 1, torch.float32, 518)


def tuned(rounds: int) -> Ratios:
    """Compare models with and without tuned backends."""
    for name, run in make_runs():
        yield compare_tuned(name, run, tune_all(run), rounds)


def compare_tuned(text: str, run: Run, choices: dict[str, str], rounds: int) -> tuple[str, float]:
    runs = {"untuned": run, "tuned": partial(with_choices, choices, run)}
    times = {each: median(t) for each, t in time_in_turns(runs, rounds, CPU).items()}
    return f"{text}: untuned over tuned", times["tuned"] / times["untuned"]


@contextlib.contextmanager
def stopped_process(*words: str) -> Iterator[subprocess.Popen]:
    """Start Python in another process, and stop it by a signal until it is continued."""
    command = [sys.executable, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()  # it is ready
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def compare_busy(runs: dict[str, Run], process: subprocess.Popen, rounds: int) -> dict[str, float]:
    """Return {name: time while the process runs, divided by the time while it is stopped}."""

    def next_to_it(run: Run) -> None:
        process.send_signal(signal.SIGCONT)
        try:
            run()
        finally:
            process.send_signal(signal.SIGSTOP)

    both = runs | {f"{name} busy": partial(next_to_it, run) for name, run in runs.items()}
    times = {each: median(t) for each, t in time_in_turns(both, rounds, CPU).items()}
    return {name: times[f"{name} busy"] / times[name] for name in runs}


def make_attention(backend: str) -> Run:
    """Return a function that runs both passes of attention on 56 x 56 tokens."""
    case = Case(Window((56, 56), 8), 2, 12, 64, 1, table_bias=True, global_bias=True)
    inputs = make_inputs(case)
    leaves = leaves_of(inputs)

    def both_passes() -> None:
        out = forward(BACKENDS[backend].attend, case, inputs, leaves)
        torch.autograd.grad(out, list(leaves.values()), inputs.cotangent)

    return both_passes


def busy(rounds: int) -> Ratios:
    """Compare times alone with times next to another process."""
    names = ("vil_tiny", PAIRS["vil_tiny"])
    steps = {name: make_training(create(name), 8, torch.float32) for name in names}
    attention = {name: make_attention(name) for name in ("native", "blocked")}
    with stopped_process("-c", "print(flush=True)\nwhile True: pass") as process:
        for name, ratio in compare_busy(attention, process, rounds).items():
            yield f"attention, {name}: next to a busy process", ratio
        slower = compare_busy(steps, process, rounds)
        for name, ratio in slower.items():
            yield f"{name}, training step: next to a busy process", ratio
        yield "its slowdown over deit_tiny's", slower[names[0]] / slower[names[1]]
    slower = {}
    for name in names:
        with stopped_process(__file__, "--repeat", name) as process:
            slower |= compare_busy({name: steps[name]}, process, rounds)
            yield f"{name}, training step: next to the same training", slower[name]
    yield "its slowdown over deit_tiny's, two trainings", slower[names[0]] / slower[names[1]]


def repeat(name: str) -> None:
    """Train a model until the process is killed."""
    step = make_training(create(name), 8, torch.float32)
    step()
    print(flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        step()


PARTS = {function.__name__: function for function in (models, tuned, busy)}


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    if args.repeat:
        repeat(args.repeat)
        return
    make_attention("native")()  # compiles the library
    about, found = machine(CPU), {}
    print(f"{about['name']}, {THREADS} threads, torch {about['torch']}, {args.rounds} rounds")
    for part in args.parts or PARTS:
        print(f"\n{part}")
        start = time.monotonic()
        for text, ratio in PARTS[part](args.rounds):
            found[text] = round(ratio, 3)
            print(f"  {text}: {ratio:.3g}", flush=True)
        print(f"  ({time.monotonic() - start:.0f} s)")
    if not args.parts:
        write_json(args.json, {"machine": about, "rounds": args.rounds, "ratios": found})


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"measurements ({ROUNDS})")
    parser.add_argument("--repeat", help=argparse.SUPPRESS)  # in the other process
    add_json(parser, RESULTS / "untuned-cpu.json")
    run(parser.parse_args())
