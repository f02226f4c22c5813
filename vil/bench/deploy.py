"""Compare ways to run a model for inference on a CPU: speed, memory, size and predictions.

A path is one such way, for example "onnx+int8". It is not timed if its predictions differ too often
from those of eager mode.

Shapes: B batch, c input channels, H W image size, N images, K classes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor, nn

from vil.export import export_model, load_exported, quantize_linears
from vil.integrations.optimize import optimize_for_inference
from vil.utils.errors import one_line
from vil.utils.interleaved_timer import Candidate, time_interleaved
from vil.utils.resident_memory import resident_growth

MIB = 2**20
CPU = torch.device("cpu")
RECOMPILES = 10_000  # limit of compilations, which all models of a class share
Run = Callable[[Tensor], Tensor]  # images (B, c, H, W) -> logits (B, K)


@dataclass
class Subject:
    """A model to run for inference in several ways, and images to run it on.

    model: in float32, on the CPU.
    size: (H, W) of the input images.
    calibration (N, c, H, W): images for static int8 quantization.
    folder: where the exported files of the model are written.
    images (N, c, H, W), targets (N,): real images and their true classes, to compare predictions;
    None for a model with random weights.
    published: published top-1 on ImageNet in percent; None if unknown.
    """

    name: str
    model: nn.Module
    size: tuple[int, int]
    calibration: Tensor
    folder: Path
    images: Tensor | None = None
    targets: Tensor | None = None
    published: float | None = None

    def random_images(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(count, self.calibration.shape[1], *self.size, generator=generator)


@dataclass
class Row:
    """Results of one way to run a model for inference.

    path: a key of PATHS, such as "onnx+int8".
    published, top1: the published accuracy on ImageNet, and the measured accuracy on
    `Subject.images`, in percent.
    size_mib: size of the exported file, or of the weights in memory.
    memory_mib: growth of the resident memory from loading and running the model.
    agreement: percentage of `Subject.images` with the same predicted class as in eager mode.
    speed: {batch size: images per second}.
    reason: why results are missing, or "".
    """

    model: str
    path: str
    published: float | None = None
    size_mib: float | None = None
    memory_mib: float | None = None
    agreement: float | None = None
    top1: float | None = None
    speed: dict[int, float] = field(default_factory=dict)
    reason: str = ""

    def plain(self, batches: Sequence[int]) -> dict:
        """Return the row as a flat dict for JSON and CSV."""
        cells = {name: value for name, value in vars(self).items() if name != "speed"}
        reason = cells.pop("reason")
        speeds = {f"images_per_second_{batch}": self.speed.get(batch) for batch in batches}
        return cells | speeds | {"reason": reason}


class Deployment(NamedTuple):
    """Model that is ready to be loaded for inference.

    load: function that loads the model and returns a function from images to logits. bytes: size of
    the exported file, or of the weights in memory.
    """

    load: Callable[[], Run]
    bytes: int


def deploy_torch(
    subject: Subject, *, dtype: torch.dtype = torch.float32, fast: bool = False, compile=False
) -> Deployment:
    """Deploy a model in PyTorch, with the precision `dtype`.

    fast: convert the model to `dtype` with `optimize_for_inference`. By default, the unchanged
    model runs under autocast to `dtype`. compile: also compile the model with torch.compile.
    """

    def load() -> Run:
        if fast:
            return optimize_for_inference(subject.model, dtype=dtype, compile=compile)
        model = copy.deepcopy(subject.model).eval()
        if compile:
            model.compile()

        def run(images: Tensor) -> Tensor:
            with torch.inference_mode(), torch.autocast("cpu", dtype, dtype != torch.float32):
                return model(images).float()

        return run

    count = sum(weight.numel() for weight in subject.model.parameters())
    return Deployment(load, count * (dtype.itemsize if fast else 4))


def deploy_file(
    subject: Subject, suffix: str, write: Callable[[Subject, Path], None]
) -> Deployment:
    """Deploy a model as an exported file. If the file is not in `subject.folder` yet, write it.

    suffix: ending of the file name, such as ".onnx". write: function that exports the model to the
    file.
    """
    file = subject.folder / f"{subject.name.replace('/', '-')}{suffix}"
    if not file.exists():
        write(subject, file)
    return Deployment(partial(load_exported, file), file.stat().st_size)


def write_export(subject: Subject, file: Path, format: str | None = None) -> None:
    export_model(subject.model, file, size=subject.size, dynamic=("batch",), format=format)


def write_int8(subject: Subject, file: Path, static: bool = False) -> None:
    deploy_file(subject, ".onnx", write_export)  # the same file as that of the path "onnx"
    source = file.with_name(file.name.partition(".int8")[0] + ".onnx")
    quantize_linears(source, file, [subject.calibration] if static else None)


BF16 = torch.bfloat16
PATHS: dict[str, Callable[[Subject], Deployment]] = {
    "eager": deploy_torch,
    "bf16": partial(deploy_torch, dtype=BF16),
    "compile": partial(deploy_torch, compile=True),
    "bf16+compile": partial(deploy_torch, dtype=BF16, compile=True),
    "fast": partial(deploy_torch, fast=True),
    "fast+bf16": partial(deploy_torch, dtype=BF16, fast=True),
    "fast+compile": partial(deploy_torch, fast=True, compile=True),
    "fast+bf16+compile": partial(deploy_torch, dtype=BF16, fast=True, compile=True),
    "aoti": partial(deploy_file, suffix=".pt2", write=partial(write_export, format="aoti")),
    "onnx": partial(deploy_file, suffix=".onnx", write=write_export),
    "onnx+int8": partial(deploy_file, suffix=".int8.onnx", write=write_int8),
    "onnx+int8+static": partial(
        deploy_file, suffix=".int8.static.onnx", write=partial(write_int8, static=True)
    ),
}
PLAIN = "eager"  # the path with whose predictions those of the others are compared


def compare_paths(
    subjects: Sequence[Subject],
    paths: Sequence[str],
    *,
    batches: Sequence[int],
    rounds: int,
    least_agreement: float,
    say: Callable[[str], None],
) -> list[Row]:
    """Run each model for inference in several ways. Returns a row of results per model and way.

    paths: the ways, keys of PATHS. The first must be "eager", because the others are compared with
    it.
    batches: batch sizes to time.
    rounds: number of measurements, in each of which all models and paths take turns.
    least_agreement: percentage of images on which a path must predict the same class as "eager".
    Otherwise, the path is not timed.
    say: function that is called with each line of progress.
    """
    rows: list[Row] = []
    loaded: dict[int, tuple[Subject, Run]] = {}
    # By default, torch compiles a function at most eight times, and then runs it uncompiled. All
    # models of a class share this limit, because they have the same functions.
    limits = dict(recompile_limit=RECOMPILES, accumulated_recompile_limit=RECOMPILES)
    with torch._dynamo.config.patch(**limits):
        for subject in subjects:
            expected = None
            for path in paths:
                row, run = prepare(subject, path, max(batches))
                if run is not None and subject.images is not None:
                    logits = predict(run, subject.images, max(batches))
                    expected = logits.argmax(1) if path == PLAIN else expected
                    check_predictions(row, logits, expected, subject.targets, least_agreement)
                say(f"{row.model} {path}: {row.reason or 'ready'}")
                rows.append(row)
                if run is not None and not row.reason:
                    loaded[len(rows) - 1] = subject, run
        for batch in batches:
            time_batch(rows, loaded, batch, rounds)
            say(f"batch {batch}: {rounds} rounds measured")
    return rows


def prepare(subject: Subject, path: str, batch: int) -> tuple[Row, Run | None]:
    """Load a model for inference, and measure its size and memory.

    Returns the results, and a function from images to logits. If loading or running the model
    fails, the function is None, and the results have the reason. path: a key of PATHS. batch:
    number of images to run.
    """
    row = Row(subject.name, path, subject.published)
    images = subject.random_images(batch)
    try:
        load, size = PATHS[path](subject)
        run, growth = resident_growth(load, lambda run: run(images))
    except Exception as error:  # of the exporters, compilers and runtimes
        row.reason = one_line(error)
        return row, None
    row.size_mib = size / MIB
    row.memory_mib = None if growth is None else growth / MIB
    return row, run


def predict(run: Run, images: Tensor, batch: int) -> Tensor:
    """Return the logits (N, K) of images (N, c, H, W).

    run: function from images to logits. Every batch has `batch` images, because some compilers
    compile the model for each batch size. The last batch is padded with copies of its first image.
    """
    logits = []
    for part in images.split(batch):
        filled = torch.cat([part, part[:1].expand(batch - len(part), -1, -1, -1)])
        logits.append(run(filled)[: len(part)].float())
    return torch.cat(logits)


def check_predictions(
    row: Row, logits: Tensor, expected: Tensor | None, targets: Tensor, least: float
) -> None:
    """Store in `row` the accuracy of predictions, and their agreement with eager mode.

    Also stores a reason not to time the model if the agreement is too low or a logit is not finite.

    logits: (N, K). expected: classes (N,) predicted in eager mode; None if eager mode failed.
    targets: true classes (N,). least: lowest allowed agreement in percent.
    """
    predicted = logits.argmax(1)
    row.top1 = 100 * (predicted == targets).double().mean().item()
    if expected is not None:
        row.agreement = 100 * (predicted == expected).double().mean().item()
    if not logits.isfinite().all():
        row.reason = "not timed: some logits are not finite"
    elif row.agreement is not None and row.agreement < least:
        row.reason = (
            f"not timed: predicts the same class as {PLAIN} on {row.agreement:.1f} % of "
            f"{len(logits)} images, less than {least:g} %"
        )


def time_batch(
    rows: Sequence[Row], loaded: Mapping[int, tuple[Subject, Run]], batch: int, rounds: int
) -> None:
    """Time all loaded models in interleaved rounds on random images.

    Stores the images per second in `rows`. loaded: {index into `rows`: (model, function from images
    to logits)}.
    """
    calls = {
        str(number): partial(run, subject.random_images(batch))
        for number, (subject, run) in loaded.items()
    }
    # An untimed call comes first, because the threads of the previous model's runtime, such as
    # onnxruntime, still occupy the CPU for a while.
    candidates = {name: Candidate(call, before=call) for name, call in calls.items()}
    times, dropped = time_interleaved(candidates, rounds, CPU, exempt=list(candidates))
    for name, each in times.items():
        rows[int(name)].speed[batch] = batch * 1e3 / each.forward_ms
    for name, reason in dropped.items():
        rows[int(name)].reason = reason
