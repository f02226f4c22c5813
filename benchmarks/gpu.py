"""Measure attention, models and training on one GPU. Every number is written at once.

  python benchmarks/gpu.py PART ... --out FOLDER        parts: exact attention models syncs ...
  python benchmarks/gpu.py PART ... --out FOLDER --dry  a tiny version on a CPU, to test the script

Each number is a line of FOLDER/rows.jsonl. A part that fails writes a line too, and the next one
runs. The parts up to `sweep` need only torch, triton, timm and yacs; `syncs`, `train`, `resume` and
`recipes` train with vil, which needs its other dependencies. scripts/gpu_check.sh runs the parts
under time limits.

Times are medians of CUDA events around calls that are queued one after another, so the time that
the host needs to launch a kernel counts only if the GPU waits for it.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

MILLISECONDS = 60  # of calls in one measurement
GLOBALS = 1  # global tokens of the attention cases
# (grid side, window, batch, heads, channels per head): stages 1 and 2 of vil_small, then others
CASES = [
    (56, 7, 128, 3, 32), (28, 7, 128, 3, 64), (14, 7, 128, 6, 64), (56, 8, 32, 6, 64),
    (28, 8, 128, 6, 64), (112, 8, 8, 6, 64), (224, 8, 2, 6, 64), (56, 15, 32, 3, 64),
    (14, 14, 128, 6, 64),  # one chunk, as in full attention
]  # fmt: skip
MODELS = [
    "vil_tiny", "vil_small", "vil_small_rpb", "timm/deit_small_patch16_224",
    "timm/swin_tiny_patch4_window7_224", "timm/convnext_tiny",
]  # fmt: skip


class Bench:
    """Where the measurements run, and where they are written.

    out: folder of the results. dry: run on a CPU, as small as possible. only: a regular expression
    of the models to measure. scratch: folder of runs.
    """

    def __init__(self, out: Path, dry: bool, only: str = "") -> None:
        self.out, self.dry, self.only = out, dry, only
        self.device = torch.device("cpu" if dry else "cuda")
        self.scratch = Path(tempfile.mkdtemp())
        out.mkdir(parents=True, exist_ok=True)

    def row(self, what: str, **values: Any) -> None:
        line = json.dumps({"what": what, **values}, default=str)
        with (self.out / "rows.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def clock(self, call: Callable[[], Any], milliseconds: float = MILLISECONDS) -> float:
        """Return the median milliseconds of a call."""
        for _ in range(1 if self.dry else 3):
            call()
        self.sync()
        start = time.perf_counter()
        call()
        self.sync()
        once = 1e3 * (time.perf_counter() - start)
        if self.dry:
            return once
        count = max(5, min(100, int(milliseconds / max(once, 1e-3))))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        self.sync()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))

    @contextlib.contextmanager
    def peak(self) -> Iterator[list[float]]:
        """Yield a list that gets the peak of allocated MiB, above what was allocated before."""
        found: list[float] = []
        before = 0 if self.dry else torch.cuda.memory_allocated()
        if not self.dry:
            torch.cuda.reset_peak_memory_stats()
        yield found
        found.append(0 if self.dry else (torch.cuda.max_memory_allocated() - before) / 2**20)

    @contextlib.contextmanager
    def guarded(self, what: str, **spec: Any) -> Iterator[None]:
        """Write a line instead of raising, and free memory."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.row(what, **spec, error=f"{type(error).__name__}: {error}"[:400])
        if not self.dry:
            torch.cuda.empty_cache()

    def kernel_times(self, call: Callable[[], Any]) -> dict[str, float]:
        """Return {kernel: microseconds} of one call, a mean of three calls, longest first."""
        from torch.profiler import ProfilerActivity, profile

        call()
        self.sync()
        activity = ProfilerActivity.CPU if self.dry else ProfilerActivity.CUDA
        with profile(activities=[activity]) as profiler:
            for _ in range(3):
                call()
            self.sync()
        times: collections.Counter[str] = collections.Counter()
        for event in profiler.key_averages():
            times[event.key[:60]] += round(event.device_time_total / 3, 1)
        return dict(times.most_common(14))


def machine(bench: Bench) -> None:
    """The card, and the rates that a large matmul and a large copy reach on it."""
    import triton

    about = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version[:6]}
    if not bench.dry:
        about["gpu"] = torch.cuda.get_device_name()
    bench.row("machine", **about, date=time.strftime("%Y-%m-%d"))
    size = 256 if bench.dry else 8192
    a = torch.randn(size, size, device=bench.device, dtype=torch.bfloat16)
    source, target = torch.empty(2, size << 17 if not bench.dry else size, device=bench.device)
    flops = 2 * size**3 / bench.clock(lambda: a @ a) / 1e9
    rate = 2 * source.nbytes / bench.clock(lambda: target.copy_(source)) / 1e6
    bench.row("ceilings", tflops=flops, gb_per_s=rate)


# Attention


@dataclasses.dataclass
class Inputs:
    """A call of local attention. Queries, keys and values are views of one tensor, as in models."""

    case: Any
    leaves: list[Tensor]
    bias: Any
    dout: Tensor

    def attend(self, backend: str) -> Tensor:
        from vil.ops import BACKENDS

        options = dict(num_global=GLOBALS, bias=self.bias, scale=self.case.head_dim**-0.5)
        return BACKENDS[backend].attend(*self.leaves[:3], self.case.window, **options)

    def differentiate(self, call: Callable[[], Tensor]) -> None:
        torch.autograd.grad(call(), self.leaves, self.dout)


def make_inputs(bench: Bench, shape: tuple[int, ...], has_bias: bool) -> Inputs:
    from vil.ops import Case, LocalBias, Window

    grid, w, batch, heads, dim = shape
    window, dtype, device = Window((grid, grid), w), torch.bfloat16, bench.device
    case = Case(window, batch, heads, dim, GLOBALS, dtype, device.type, has_bias, has_bias)
    torch.manual_seed(0)
    tokens = GLOBALS + window.length
    qkv = torch.randn(batch, tokens, 3, heads, dim, device=device, dtype=dtype)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    leaves = [x.detach().requires_grad_() for x in (q[:, :, GLOBALS:], k, v)]
    bias = LocalBias()
    if has_bias:
        table = torch.randn(window.table_entries, heads, device=device).requires_grad_()
        to_global = torch.randn(heads, GLOBALS, device=device).requires_grad_()
        leaves, bias = [*leaves, table, to_global], LocalBias(table.mT, to_global)
    return Inputs(case, leaves, bias, torch.randn_like(leaves[0]))


def measure_call(
    bench: Bench, name: str, spec: dict, call: Callable[[], Tensor], leaves: list[Tensor],
    dout: Tensor,
) -> None:  # fmt: skip
    def both() -> None:
        torch.autograd.grad(call(), leaves, dout)

    with bench.guarded("attention", backend=name, **spec):
        with torch.no_grad():
            forward = bench.clock(call)
        with bench.peak() as peak:
            total = bench.clock(both)
        start = time.perf_counter()
        both()
        host = 1e3 * (time.perf_counter() - start)  # to queue the kernels
        bench.sync()
        times = dict(forward_ms=forward, both_ms=total, host_ms=host)
        bench.row("attention", backend=name, **spec, **times, peak_mib=peak[0])


def attention(bench: Bench) -> None:
    """Local attention, forward and with backward, against dense and other local attention."""
    cases = [(8, 4, 1, 1, 16)] if bench.dry else CASES
    for shape, has_bias in itertools.product(cases, (True, False)):
        grid, w, batch, heads, dim = shape
        spec = dict(grid=grid, w=w, batch=batch, heads=heads, dim=dim, bias=has_bias)
        inputs = make_inputs(bench, shape, has_bias)
        names = ["blocked"] if bench.dry else ["triton"]
        if not bench.dry and grid <= 112:
            names.append("chunk_handgrad")
        if not bench.dry and batch * heads * grid**4 < 1e9:  # it stores the scores
            names.append("masked")
        for name in names:
            call = partial(inputs.attend, name)
            measure_call(bench, name, spec, call, inputs.leaves, inputs.dout)
            if name == "triton":
                with bench.guarded("kernels", **spec):
                    both = partial(inputs.differentiate, call)
                    bench.row("kernels", **spec, microseconds=bench.kernel_times(both))
        dense(bench, spec, inputs)


def dense(bench: Bench, spec: dict, inputs: Inputs) -> None:
    """Attention of all queries to all keys. A bias is a mask that needs no gradient or, on small
    grids, also one that is learned."""
    q, k, v = leaves = inputs.leaves[:3]
    kernels, mask = ["FLASH_ATTENTION", "CUDNN_ATTENTION"], None
    if spec["bias"]:
        if spec["grid"] > 112:
            return
        length = (k.shape[2] + 7) // 8 * 8  # rows must be aligned
        mask = torch.zeros(1, q.shape[1], q.shape[2], length, device=q.device, dtype=q.dtype)
        mask, kernels = mask[..., : k.shape[2]], ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]

    def attend(kernel: str, mask: Tensor | None) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return F.scaled_dot_product_attention(q, k, v, mask)

    for name in ["MATH"] if bench.dry else kernels:
        call = partial(attend, name, mask)
        measure_call(bench, f"sdpa {name.lower()}", spec, call, leaves, inputs.dout)
    if mask is not None and spec["grid"] <= 28:
        mask.requires_grad_()
        name = "MATH" if bench.dry else kernels[0]
        call, name = partial(attend, name, mask), f"sdpa {name.lower()}, learned"
        measure_call(bench, name, spec, call, [*leaves, mask], inputs.dout)


def flex(bench: Bench) -> None:
    """FlexAttention where a chunk has 64 tokens."""
    cases = [(8, 8, 1, 1, 16)] if bench.dry else [shape for shape in CASES if shape[1] == 8]
    for shape, has_bias in itertools.product(cases, (True, False)):
        measure_flex(bench, shape, has_bias)


def measure_flex(bench: Bench, shape: tuple[int, ...], has_bias: bool) -> None:
    """FlexAttention on chunks of 64 tokens in blocks of 64, without global tokens and without the
    time to order the tokens by chunk."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    grid, w, batch, heads, dim = shape
    spec = dict(grid=grid, w=w, batch=batch, heads=heads, dim=dim, bias=has_bias)
    chunks = grid // w
    table = torch.randn(heads, 4 * w - 1, 4 * w - 1, device=bench.device)

    def position(token: Tensor) -> tuple[Tensor, Tensor]:
        chunk, inside = token // (w * w), token % (w * w)
        return chunk // chunks * w + inside // w, chunk % chunks * w + inside % w

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query, key = query // (w * w), key // (w * w)
        return ((query // chunks - key // chunks).abs() <= 1) & (
            (query % chunks - key % chunks).abs() <= 1
        )

    def score(x: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        (x1, y1), (x2, y2) = position(query), position(key)
        return x + table[h, x1 - x2 + 2 * w - 1, y1 - y2 + 2 * w - 1]

    with bench.guarded("attention", backend="flex", **spec):
        shape = (batch, heads, grid * grid, dim)
        q, k, v, dout = torch.randn(4, *shape, device=bench.device, dtype=torch.bfloat16)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        mask = create_block_mask(visible, None, None, grid**2, grid**2, bench.device.type, 64)
        sizes = {f"{axis}{suffix}": 64 for axis in ("BLOCK_M", "BLOCK_N") for suffix in ("", 1, 2)}
        compiled = torch.compile(flex_attention, dynamic=False)
        if bench.dry:
            return  # the CPU has no backward pass

        def call() -> Tensor:
            options = dict(block_mask=mask, kernel_options=sizes)
            return compiled(*leaves, score_mod=score if has_bias else None, **options)

        measure_call(bench, "flex", spec, call, leaves, dout)


class Trial(NamedTuple):
    """A kernel with other launch parameters, on a case of CASES."""

    kernel: str
    shape: tuple[int, ...]
    queries: int
    keys: int
    warps: int
    stages: int
    registers: int

    def run(self, bench: Bench, measure: bool) -> float | None:
        """Return the microseconds of the kernel in a training step, or only compile it."""
        from vil.ops.backends.triton import launches
        from vil.ops.backends.triton.launch import current_target, launch_options

        table = launches.LAUNCHES[launches.kind_of(current_target())]
        column, saved = launches.HEAD_DIMS.index(self.shape[4]), table[self.kernel]
        entry = launches.Launch(*self[2:])
        table[self.kernel] = (*saved[:column], entry, *saved[column + 1 :])
        inputs = make_inputs(bench, self.shape, True)
        call = partial(inputs.differentiate, partial(inputs.attend, "triton"))
        launch_options.cache_clear()
        try:
            if measure:
                times = bench.kernel_times(call)
                return next(t for name, t in times.items() if name.startswith(self.kernel))
            call()
        finally:
            table[self.kernel] = saved
            launch_options.cache_clear()


def compile_trials(out: Path, trials: list[Trial]) -> None:
    bench = Bench(out, dry=False)
    for trial in trials:
        with contextlib.suppress(Exception):  # `sweep` reports it
            trial.run(bench, measure=False)


def sweep(bench: Bench) -> None:
    """The time of each kernel with other block sizes, warps, stages and registers."""
    if bench.dry:
        return
    sizes = {
        "forward": [(64, 64), (64, 32), (128, 64)], "query": [(64, 64), (64, 32)],
        "key": [(64, 64), (32, 64), (16, 64)], "tile": [(64, 64), (64, 32)],
    }  # fmt: skip
    trials = [
        Trial(kernel, shape, *block, warps, stages, registers)
        for shape in ((56, 7, 128, 3, 32), (56, 8, 8, 6, 64))
        for kernel, blocks in sizes.items()
        for block in blocks
        for warps, stages, registers in itertools.product((4, 8), (1, 2, 3), (0, 128, 168))
        if warps == 4 or not registers
    ]
    processes = os.cpu_count() or 1
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        parts = [trials[n::processes] for n in range(processes)]
        list(pool.map(partial(compile_trials, bench.out), parts))
    for trial in trials:
        with bench.guarded("sweep", **trial._asdict()):
            bench.row("sweep", **trial._asdict(), microseconds=trial.run(bench, measure=True))


# Models


def build_model(bench: Bench, name: str, **options: Any) -> nn.Module:
    """Build a timm model, or one of ours with random shift off and the backend `options` names."""
    if name.startswith("timm/"):
        import timm

        model = timm.create_model(name.removeprefix("timm/"), num_classes=1000)
    else:
        import vil

        arguments = {"longformer": {"backend": options.get("backend", "auto")}}
        model = vil.get_model(name, num_classes=1000, attention_args=arguments, drop_path_rate=0.1)
    return model.to(bench.device, memory_format=torch.channels_last)


def exact(bench: Bench) -> None:
    """Errors of a model's output and gradients against the CPU in float64, beside those of dense
    masked attention in the same precision."""
    name = "vil_nano" if bench.dry else "vil_small_rpb"
    size, ours = (64, "blocked") if bench.dry else (224, "triton")
    torch.manual_seed(0)
    reference = build_model(Bench(bench.out, dry=True), name, backend="chunk_autograd").eval()
    images, target = torch.randn(2, 3, size, size), torch.randn(2, 1000)
    truth = outputs(reference.double(), images.double(), target.double(), None)
    for precision in ("float32", "tf32", "bfloat16", "float16", "bfloat16 compiled"):
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        dtype = getattr(torch, precision.split()[0]) if "16" in precision else None
        errors = {}
        for backend in (ours, "masked"):
            model = build_model(bench, name, backend=backend).eval()
            model.load_state_dict({k: v.float() for k, v in reference.state_dict().items()})
            if "compiled" in precision:
                model.compile(backend="eager" if bench.dry else "inductor")
            found = outputs(model, images.to(bench.device), target.to(bench.device), dtype)
            errors[backend] = {key: distance(x, truth[key]) for key, x in found.items()}
        torch.set_float32_matmul_precision("highest")
        worst = max(
            errors[ours], key=lambda key: errors[ours][key] / (errors["masked"][key] + 1e-9)
        )
        bench.row(
            "exact", model=name, precision=precision, output=errors[ours]["output"],
            output_masked=errors["masked"]["output"], worst=worst, worst_error=errors[ours][worst],
            worst_masked=errors["masked"][worst],
        )  # fmt: skip


def distance(x: Tensor, truth: Tensor) -> float:
    """Return |x - truth| / |truth|."""
    return ((x.double().cpu() - truth).norm() / truth.norm().clamp(min=1e-12)).item()


def outputs(model: nn.Module, images: Tensor, target: Tensor, dtype: Any) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    model.zero_grad()
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        y = model(images)
    (y.to(target.dtype) * target).sum().backward()
    grads = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach(), **grads}


def model_specs(bench: Bench) -> Iterator[dict]:
    """Yield the arguments of the measurements of models."""
    names, batch = (["vil_nano"], 2) if bench.dry else (MODELS, 128)
    ours = "blocked" if bench.dry else "triton"
    if not bench.dry:
        yield dict(model="vil_small", mode="eager", batch=batch, backend="chunk_handgrad")
    for mode in ("eager", "default", "reduce-overhead")[: 1 if bench.dry else 3]:
        for name in filter(re.compile(bench.only).search, names):
            backend = "" if name.startswith("timm/") else ours
            yield dict(model=name, mode=mode, batch=batch, backend=backend)
            if mode != "default":
                yield dict(model=name, mode=mode, batch=1, backend=backend)


def models(bench: Bench) -> None:
    """Images per second and memory, in training and inference, eager and compiled, in bfloat16. One
    image at a time: inference only."""
    for spec in model_specs(bench):
        with bench.guarded("model", **spec):
            model = build_model(bench, spec["model"], backend=spec["backend"])
            measure_model(bench, spec, model)


def make_steps(
    bench: Bench, spec: dict, model: nn.Module
) -> tuple[Callable[[], None], Callable[[], Tensor]]:
    """Return a training step and a forward pass in bfloat16, compiled if the mode says so."""
    size = 64 if bench.dry else 224
    images = torch.randn(spec["batch"], 3, size, size, device=bench.device)
    images = images.contiguous(memory_format=torch.channels_last)
    target = torch.randint(10, (spec["batch"],), device=bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not bench.dry)
    if spec["mode"] != "eager":
        model.compile(mode=spec["mode"])

    def forward() -> Tensor:
        with torch.autocast(bench.device.type, torch.bfloat16):
            return model(images)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward().float(), target).backward()
        optimizer.step()

    return step, forward


def measure_model(bench: Bench, spec: dict, model: nn.Module) -> None:
    step, forward = make_steps(bench, spec, model.train())
    if spec["batch"] > 1:
        start = time.perf_counter()
        with bench.peak() as peak:
            milliseconds = bench.clock(step, 500)
        first = time.perf_counter() - start
        rate = 1e3 * spec["batch"] / milliseconds
        bench.row("model", **spec, training=True, images_s=rate, peak_mib=peak[0], first_s=first)
    model.eval()
    with torch.inference_mode(), bench.peak() as peak:
        milliseconds = bench.clock(forward, 300)
    rate = 1e3 * spec["batch"] / milliseconds
    bench.row("model", **spec, training=False, images_s=rate, peak_mib=peak[0])


def compile_model(out: Path, dry: bool, spec: dict) -> float:
    """Compile both passes of a model into the cache of the compiler. Returns seconds."""
    bench, start = Bench(out, dry), time.perf_counter()
    model = build_model(bench, spec["model"], backend=spec["backend"])
    step, forward = make_steps(bench, spec, model.train())
    step()
    model.eval()
    with torch.inference_mode():
        forward()
    bench.sync()
    return time.perf_counter() - start


def compile_models(bench: Bench) -> None:
    """Compile all models at the same time, in processes, so that `models` finds them in a cache."""
    mode = "eager" if bench.dry else "default"
    specs = [spec for spec in model_specs(bench) if spec["mode"] == mode]
    with ProcessPoolExecutor(len(specs), get_context("spawn")) as pool:
        jobs = [pool.submit(compile_model, bench.out, bench.dry, spec) for spec in specs]
        for spec, job in zip(specs, jobs):
            with bench.guarded("compile", **spec):
                bench.row("compile", **spec, seconds=job.result())


def profile_step(bench: Bench) -> None:
    """Where the time of a training step goes: kernels, and how long the GPU has none to run."""
    from torch.profiler import ProfilerActivity, profile

    for spec in model_specs(bench):
        if spec["mode"] == "reduce-overhead" or spec["batch"] == 1:
            continue
        model = build_model(bench, spec["model"], backend=spec["backend"])
        step, _ = make_steps(bench, spec, model.train())
        milliseconds = bench.clock(step, 300)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not bench.dry)
        with profile(activities=activities) as profiler:
            step()
            bench.sync()
        name = f"step-{Path(spec['model']).name}-{spec['mode']}-{spec['backend']}"
        averages = profiler.key_averages()
        key = "self_cpu_time_total" if bench.dry else "self_cuda_time_total"
        table = averages.table(sort_by=key, row_limit=80, max_name_column_width=70)
        host = averages.table(sort_by="self_cpu_time_total", row_limit=50, max_name_column_width=70)
        (bench.out / f"{name}.txt").write_text(table + host)
        kernels: collections.Counter[str] = collections.Counter()
        for event in averages:
            on_gpu = event.device_type != torch.autograd.DeviceType.CPU
            if on_gpu and not event.is_user_annotation:
                kernels[event.key[:60]] += round(event.self_device_time_total, 1)
        busy, largest = kernels.total() / 1e3, dict(kernels.most_common(25))
        bench.row("step", **spec, step_ms=milliseconds, busy_ms=busy, microseconds=largest)


def host(bench: Bench) -> None:
    """What Python does in calls of local attention on small inputs, which a GPU waits for."""
    import cProfile
    import pstats

    shape, backend = ((8, 4, 1, 1, 16), "blocked") if bench.dry else ((14, 7, 2, 6, 64), "triton")
    for has_bias in (True, False):
        inputs = make_inputs(bench, shape, has_bias)
        call = partial(inputs.differentiate, partial(inputs.attend, backend))
        milliseconds, profiler = bench.clock(call), cProfile.Profile()
        with profiler:
            for _ in range(2 if bench.dry else 200):
                call()
        bench.sync()
        bench.row("host", bias=has_bias, both_ms=milliseconds)
        with (bench.out / f"host-bias-{has_bias}.txt").open("w") as file:
            for order in ("tottime", "cumtime"):
                pstats.Stats(profiler, stream=file).sort_stats(order).print_stats(60)


# Training with vil


def options_of(bench: Bench, *more: str) -> list[str]:
    """Return the overrides of a config for a run on this device, followed by `more`."""
    backend = "blocked" if bench.dry else "triton"
    common = [
        f"DEVICE={bench.device.type}",
        f"MODEL.VIT.MSVIT.BACKEND={backend}",
        "AMP.ENABLED=True",
    ]
    return [*common, "AMP.DTYPE=bfloat16", "SOLVER.WARMUP_EPOCHS=0", "RUN.SAVE_EVERY=999", *more]


@contextlib.contextmanager
def at_each_step(act: Callable[[int], None]) -> Iterator[None]:
    """Call act(step) at the start of each training step of vil.train; steps count from 0."""
    from vil.engine import loop

    set_lr, steps = loop.set_lr, itertools.count()

    def watch(*arguments: Any) -> None:
        act(next(steps))
        set_lr(*arguments)

    loop.set_lr = watch
    try:
        yield
    finally:
        loop.set_lr = set_lr


def stop_run() -> None:
    """Make vil.train save its state and raise StoppedError."""
    os.kill(os.getpid(), signal.SIGUSR1)


def syncs(bench: Bench) -> None:
    """Synchronizations of the host with the GPU in some steps of a training between log lines."""
    import vil
    from vil.errors import StoppedError

    first, last = (1, 2) if bench.dry else (10, 20)

    def watch(step: int) -> None:
        if not bench.dry and step in (first, last):
            torch.cuda.set_sync_debug_mode("warn" if step == first else "default")
        if step == last:
            stop_run()

    for dtype, optimizer in (("bfloat16", "adamw"), ("float16", "adamw"), ("bfloat16", "qhm")):
        spec, places = dict(dtype=dtype, optimizer=optimizer), collections.Counter()
        more = (
            "LOG_FREQ=1000",
            "OPTIM.EMA=0.9",
            "OPTIM.EPOCHS=2",
            f"AMP.DTYPE={dtype}",
            f"OPTIM.OPT={optimizer}",
        )
        folder = bench.scratch / f"syncs-{dtype}-{optimizer}"
        with bench.guarded("syncs", **spec), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stopped = False
            with at_each_step(watch):
                try:
                    vil.train("digits/vil_nano.yaml", options_of(bench, *more), output_dir=folder)
                except StoppedError:
                    stopped = True
            for warning in caught:
                text = str(warning.message)
                if "synchronizing CUDA operation" in text:
                    places[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
            found = dict(count=places.total(), places=places, stopped=stopped)
            bench.row("syncs", **spec, steps=last - first, **found)
        if not bench.dry:
            torch.cuda.set_sync_debug_mode("default")


def messages(bench: Bench) -> None:
    """The messages of a training on a GPU that does not exist, and on one without memory."""
    memory = "" if bench.dry else "torch.cuda.set_per_process_memory_fraction(0.0005); "
    program = f"import sys, torch; {memory}from vil.__main__ import main; sys.exit(main())"
    for words in (["DEVICE=cuda:7"], ["DATALOADER.BSZ=1024"]):
        words = [*options_of(bench), *words, "OPTIM.EPOCHS=1"]
        command = [sys.executable, "-c", program, "train", "--config-file", "digits/vil_nano.yaml"]
        command += ["--output_dir", str(bench.scratch / words[-2]), *words]
        run = subprocess.run(command, capture_output=True, text=True)
        said = run.stderr.strip().splitlines()[-3:]
        bench.row("message", words=words[-2], code=run.returncode, said=said)


def write_jpeg(job: tuple[str, int]) -> None:
    import numpy as np
    from PIL import Image

    folder, number = job
    split = "val" if number % 16 == 0 else "train"
    path = Path(folder, split, f"class{number // 16 % 8}", f"{number}.jpg")
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (94, 125, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((500, 375), Image.BICUBIC).save(path, quality=92)


def train(bench: Bench) -> None:
    """The real loop on JPEG files of 500 x 375 pixels with the paper's augmentation."""
    import vil

    folder, count = bench.scratch / "jpeg", 64 if bench.dry else 4096
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_jpeg, [(str(folder), n) for n in range(count)], chunksize=32))
    batch, config = (10, "digits/vil_nano.yaml") if bench.dry else (256, "imagenet/vil_small.yaml")
    words = [
        "DATA.TRAIN=[folder]", "DATA.TEST=[folder]", "DATA.NUM_CLASSES=auto", "RUN.EVAL_EVERY=99",
        "LOG_FREQ=2", f"DATALOADER.BSZ={batch}", "OPTIM.EMA=0.999", "AMP.MEMORY_FORMAT=nhwc",
        f"OPTIM.EPOCHS={1 if bench.dry else 5}", "INPUT.CHANNELS=3", "DATALOADER.WORKERS=-1",
    ]  # fmt: skip
    for mode in ("eager",) if bench.dry else ("eager", "default", "reduce-overhead"):
        name = f"train-{mode}"
        options = options_of(bench, *words)
        if mode != "eager":
            options += ["MODEL.COMPILE=True", f"MODEL.COMPILE_MODE={mode}"]
        with bench.guarded(name):
            result = vil.train(config, options, data=folder, output_dir=bench.scratch / name)
            lines = [line for line in result.history() if "img/s" in line]
            half = lines[len(lines) // 2 :]
            keys = [key for key in ("time", "data", "img/s", "mem") if key in half[-1]]
            bench.row(name, **{key: statistics.median(x[key] for x in half) for key in keys})


def resume(bench: Bench) -> None:
    """A run that stops and resumes ends with the same weights, bit for bit."""
    import vil
    from vil.errors import StoppedError

    config, epochs = "digits/vil_nano.yaml", 1 if bench.dry else 3
    words = options_of(bench, f"OPTIM.EPOCHS={epochs}", "DETERMINISTIC=True")
    whole = vil.train(config, words, output_dir=bench.scratch / "resume-whole")
    folder = bench.scratch / "resume-stopped"
    stop = at_each_step(lambda step: stop_run() if step == 3 else None)
    with stop, contextlib.suppress(StoppedError):
        vil.train(config, words, output_dir=folder)
    stopped = vil.train(config, words, output_dir=folder, resume=True)
    weights = [run.model.state_dict().values() for run in (whole, stopped)]
    bench.row("resume", equal_bits=all(torch.equal(a, b) for a, b in zip(*weights)))


def recipes(bench: Bench) -> None:
    """Real trainings of minutes: scanned digits, and a detector of digits in scenes."""
    import vil

    configs = ["digits/vil_nano.yaml", "scenes/mask_rcnn_vil_nano.yaml"]
    for config in configs[: 1 if bench.dry else 2]:
        with bench.guarded("recipe", config=config):
            start = time.perf_counter()
            words = options_of(bench, *(["OPTIM.EPOCHS=1"] if bench.dry else []))
            folder = bench.scratch / Path(config).stem
            result = vil.train(config, words, output_dir=folder)
            seconds = time.perf_counter() - start
            shutil.copy(folder / "metrics.jsonl", bench.out / f"{folder.name}.jsonl")
            bench.row("recipe", config=config, seconds=seconds, best=result.best)


PARTS = {
    "machine": machine, "exact": exact, "attention": attention, "flex": flex,
    "compile": compile_models, "models": models,
    "profile": profile_step, "host": host, "sweep": sweep, "syncs": syncs,
    "messages": messages, "train": train, "resume": resume,
    "recipes": recipes,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", default="", help="regular expression of models")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU")
    args = parser.parse_args()
    bench = Bench(args.out, args.dry, args.only)
    for part in args.parts:
        with bench.guarded("failed part", part=part):
            PARTS[part](bench)


if __name__ == "__main__":
    main()
