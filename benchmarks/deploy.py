"""Compare ways to run a model for inference on the CPU: speed, memory, size and predictions.

  python benchmarks/deploy.py --run runs/nano              the best checkpoint, on its test images
  python benchmarks/deploy.py --run runs/nano --paths fast,onnx+int8+static --calibration photos
  python benchmarks/deploy.py --config-file imagenet/vil_tiny.yaml --beside timm/convnext_tiny

--paths lists ways to run the model:
  eager               as vil evaluate does
  bf16                under autocast
  fast                optimized for inference, see --fast of vil evaluate
  fast+bf16           the same in bfloat16
  compile             with torch.compile
  fast+bf16+compile   all three
  aoti                a package of AOTInductor
  onnx                in onnxruntime
  onnx+int8           in onnxruntime, with dynamic quantization
  onnx+int8+static    in onnxruntime, with static quantization
--beside lists other models to measure, with random weights. For each batch size, the models and
ways are timed alternately.

The predicted classes of each way are compared with those of eager on test images. If fewer than
--agreement percent are equal, this way is not timed. For a model with random weights, only speed,
memory and size are measured. Memory is how much the resident memory of the process grows when it
loads the model and runs a batch.

For static int8 quantization, the ranges of activations are calibrated on the images in the folder
--calibration, or on training images. Writes deploy.json and deploy.csv to --out.

Shapes: B batch, c input channels, H W image size, N images, K classes.
"""

import argparse
import copy
import ctypes
import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo
from shared import CPU, MIB, make_parser, resident_bytes
from torch import Tensor, nn
from yacs.config import CfgNode

from vil.cli.arguments import at_least, config_arguments, listed, run_arguments, with_weights
from vil.config import override
from vil.data.build import read_options
from vil.data.datasets.composed import Subset
from vil.data.datasets.image_list import ImageList, ImageSource
from vil.engine.build import configure_device
from vil.export import export_model, load_exported, quantize_linears
from vil.integrations.optimize import optimize_for_inference
from vil.ops.tuning import tuning_cache
from vil.tasks import refuse_without, task_for, with_num_classes
from vil.tasks.base import Task
from vil.tasks.weight_files import find_weights
from vil.utils.errors import ConfigError, as_config_error, one_line
from vil.utils.interleaved_timer import Candidate, time_interleaved
from vil.utils.lookup import lookup
from vil.utils.text_table import align
from vil.workflows.benchmark_results import ResultFolder
from vil.workflows.execution import execution_of
from vil.workflows.inference import load_model, open_test_sets, recorded_classes
from vil.workflows.prepare import prepare_for_evaluation
from vil.workflows.quantization_images import (
    MOST,
    find_calibration_images,
    iter_calibration_batches,
    iter_inputs,
)

DEFAULT = "imagenet/vil_tiny.yaml"
PLAIN_CPU = ["DEVICE=cpu", "AMP.ENABLED=False", "MODEL.COMPILE=False", "EVAL.FAST=False"]
RECOMPILES = 10_000  # limit of compilations, which all models of a class share
# Published top-1 on ImageNet, in percent, at 224 pixels, after training on ImageNet-1k alone. The
# values of ViL are from table 4 of arXiv 2103.15358. The others are from timm's file
# results/results-imagenet.csv. levit_256 was trained with distillation.
PUBLISHED = {
    "vil_tiny": 76.3,
    "vil_tiny_rpb": 76.65,
    "vil_small": 82.0,
    "vil_small_rpb": 82.39,
    "timm/deit_tiny_patch16_224": 72.2,
    "timm/deit_small_patch16_224": 79.9,
    "timm/swin_tiny_patch4_window7_224": 81.4,
    "timm/convnext_tiny": 82.1,
    "timm/efficientvit_b1": 79.3,
    "timm/efficientvit_b2": 82.2,
    "timm/levit_256": 81.5,
    "timm/tiny_vit_11m_224": 81.5,
}
Run = Callable[[Tensor], Tensor]  # images (B, c, H, W) -> logits (B, K)


@dataclass
class Subject:
    """A model to run for inference in several ways, and images to run it on.

    model: in float32, on the CPU. size: (H, W) of the images. calibration (N, c, H, W): images for
    static int8 quantization. folder: where exported files are written. images (N, c, H, W), targets
    (N,): real images and their classes; None for a model with random weights. published: published
    top-1 on ImageNet in percent, if known.
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

    path: a key of PATHS, such as "onnx+int8". published, top1: the published accuracy on ImageNet,
    and the measured accuracy on `Subject.images`, in percent. size_mib: size of the exported file,
    or of the weights in memory. memory_mib: growth of the resident memory from loading and running
    the model. agreement: percentage of `Subject.images` with the same predicted class as in eager
    mode. speed: {batch size: images per second}. reason: why results are missing, or "".
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


# -------------------------------------------------------------------------------------- the ways


class Deployment(NamedTuple):
    """Model that is ready to be loaded: a function that loads it and returns a function from images
    to logits, and the size of the exported file or of the weights in memory."""

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
    """Deploy a model as an exported file with the ending `suffix`, which `write` exports if it is
    not in `subject.folder` yet."""
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
    "fast": partial(deploy_torch, fast=True),
    "fast+bf16": partial(deploy_torch, dtype=BF16, fast=True),
    "compile": partial(deploy_torch, compile=True),
    "fast+bf16+compile": partial(deploy_torch, dtype=BF16, fast=True, compile=True),
    "aoti": partial(deploy_file, suffix=".pt2", write=partial(write_export, format="aoti")),
    "onnx": partial(deploy_file, suffix=".onnx", write=write_export),
    "onnx+int8": partial(deploy_file, suffix=".int8.onnx", write=write_int8),
    "onnx+int8+static": partial(
        deploy_file, suffix=".int8.static.onnx", write=partial(write_int8, static=True)
    ),
}
PLAIN = "eager"  # the path with whose predictions those of the others are compared


# ------------------------------------------------------------------------------------- comparing


def compare_paths(
    subjects: Sequence[Subject],
    paths: Sequence[str],
    *,
    batches: Sequence[int],
    rounds: int,
    least_agreement: float,
) -> list[Row]:
    """Run each model for inference in several ways. Returns a row of results per model and way.

    paths: the ways, keys of PATHS. The first must be "eager", because the others are compared with
    it. batches: batch sizes to time. rounds: number of measurements, in each of which all models
    and paths take turns. least_agreement: percentage of images on which a path must predict the
    same class as "eager". Otherwise, the path is not timed.
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
                print(f"  {row.model} {path}: {row.reason or 'ready'}", flush=True)
                rows.append(row)
                if run is not None and not row.reason:
                    loaded[len(rows) - 1] = subject, run
        for batch in batches:
            time_batch(rows, loaded, batch, rounds)
            print(f"  batch {batch}: {rounds} rounds measured", flush=True)
    return rows


def prepare(subject: Subject, path: str, batch: int) -> tuple[Row, Run | None]:
    """Load a model for inference, and measure its size and memory with `batch` images.

    Returns the results, and a function from images to logits. If loading or running the model
    fails, the function is None, and the results have the reason.
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


def resident_growth(load: Callable[[], Run], use: Callable[[Run], object]) -> tuple:
    """Load a model, use it twice, and measure how much the resident memory of the process grows.

    Returns (result of `load`, growth in bytes). The growth is the peak during the second call of
    `use`, minus the memory before `load`. It includes memory that the first call allocates and
    keeps, for example for caches. It is None on systems other than Linux.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # freed memory that is kept would hide growth
        ctypes.CDLL(None).malloc_trim(0)
    before = resident_bytes("VmRSS")
    loaded = load()
    use(loaded)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak VmHWM, see proc(5)
    except OSError:
        before = None
    use(loaded)
    peak = resident_bytes("VmHWM")
    return loaded, None if before is None or peak is None else max(0, peak - before)


def predict(run: Run, images: Tensor, batch: int) -> Tensor:
    """Return the logits (N, K) of images (N, c, H, W).

    Every batch has `batch` images, because some compilers compile the model for each batch size.
    The last batch is padded with copies of its first image.
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

    Also stores a reason not to time the model if the agreement is below `least` percent or a logit
    is not finite. logits: (N, K). expected: classes (N,) predicted in eager mode; None if eager
    mode failed. targets: true classes (N,).
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
    """Time all loaded models in interleaved rounds on random images, and store the images per
    second in `rows`. loaded: {index into `rows`: (model, function from images to logits)}."""
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


# -------------------------------------------------------------------------------------- the models


def open_trained(
    cfg: CfgNode,
    name: str,
    folder: Path,
    class_names: Sequence[str],
    photos: Sequence[ImageSource],
    num_images: int,
) -> Subject:
    """Load the config's model with its weights, and its test images.

    photos: images to calibrate static int8; by default training images. num_images: number of test
    images.
    """
    inference = load_model(cfg, class_names)
    tuning_cache.load("cpu")  # of every batch size
    task = inference.task
    if photos:
        images = ImageList(photos, **read_options(cfg))
        calibration = torch.cat(list(iter_calibration_batches(task, images)))
    else:
        calibration = training_images(task, MOST)
    open_test_sets(task)
    images, targets = first_test_images(task, num_images)
    size = (cfg.INPUT.IMAGE_SIZE,) * 2
    return Subject(name, inference.model, size, calibration, folder, images, targets)


def open_untrained(cfg: CfgNode, name: str, folder: Path, published: float | None) -> Subject:
    """Build a model with random weights."""
    torch.manual_seed(cfg.SEED)
    device = configure_device(cfg)
    model = task_for(cfg, device).build_model()
    model = prepare_for_evaluation(model, execution_of(cfg, device)).eval()
    tuning_cache.load("cpu")
    size = (cfg.INPUT.IMAGE_SIZE,) * 2
    calibration = torch.randn(16, cfg.INPUT.CHANNELS, *size)
    return Subject(name, model, size, calibration, folder, published=published)


def training_images(task: Task, count: int) -> Tensor:
    """Return at most `count` images (N, c, H, W) of the training set, evenly spaced."""
    dataset = task.open_split()
    total = min(count, len(dataset))
    chosen = [number * len(dataset) // total for number in range(total)]
    return torch.cat(list(iter_inputs(task, Subset(dataset, chosen, "train"))))


def first_test_images(task: Task, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` images (N, c, H, W) of the first test set, and their classes (N,).
    Raises ConfigError if no image can be read."""
    name, loader = next(iter(task.test_sets.items()))
    images: list[Tensor] = []
    targets: list[Tensor] = []
    with closing(iter(loader)) as batches:
        for batch in batches:
            images.append(batch.to("cpu").images)
            targets.append(batch.targets)
            if sum(map(len, images)) >= count:
                break
    if not images:
        raise ConfigError(
            f"none of the images in the test set {name!r} can be read: use vil data check to find "
            "the reasons"
        )
    return torch.cat(images)[:count], torch.cat(targets)[:count]


# ----------------------------------------------------------------------------------- command line


def make_arguments() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    config_arguments(parser)
    run_arguments(parser)
    add = parser.add_argument
    names = dict(type=listed(), metavar="A,B")
    text = "ways to run the model (default: all); eager is always measured"
    add("--paths", default=list(PATHS), help=text, **names)
    add("--beside", default="none", help="other models: timm/NAME, or none (none)", **names)
    text = "batch sizes (1,16)"
    add("--batches", type=listed(at_least(1)), default="1,16", metavar="A,B", help=text)
    number = dict(type=at_least(1), metavar="N")
    text = "measurements of each model and path, after a warm-up (9)"
    add("--rounds", default=9, help=text, **number)
    add("--images", default=512, help="test images to compare on (512)", **number)
    text = "percentage of predictions that must agree with those of eager (97)"
    add("--agreement", type=float, default=97.0, metavar="P", help=text)
    add("--calibration", metavar="DIR", help="folder of images to calibrate static int8")
    add("--classes", metavar="FILE", help="file with class names (default: the run's classes.txt)")
    text = "output folder (default: benchmarks/results/deploy-<machine>-<time>)"
    add("--out", metavar="DIR", help=text)
    return parser


def run(args: argparse.Namespace) -> None:
    if not 0 <= args.agreement <= 100:
        raise ConfigError(f"--agreement: expected a number from 0 to 100, got {args.agreement:g}")
    paths = check_paths(args.paths)
    cfg, class_names = with_weights(args, DEFAULT)
    refuse_without(cfg.TASK, "limit_classes", "only classifiers are measured")
    has_weights = bool(cfg.MODEL.MODEL_PATH or cfg.MODEL.PRETRAINED)
    if cfg.MODEL.MODEL_PATH and not class_names:
        path = find_weights(cfg.MODEL.MODEL_PATH, cfg.DATA.DATA_DIR)
        class_names = recorded_classes(path, cfg.FINETUNE.HEAD)
    cfg = override(with_num_classes(cfg), PLAIN_CPU)
    photos = []
    if args.calibration is not None:
        photos = find_calibration_images(args.calibration, class_names, cfg.INPUT.CHANNELS)
    name = find_name(args, cfg)
    others = [] if args.beside == ["none"] else args.beside
    results = ResultFolder(args.out, "deploy", CPU)
    print(results.title(f"{1 + len(others)} models, {len(paths)} paths", args.rounds), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if has_weights:
            subjects = [open_trained(cfg, name, folder, class_names, photos, args.images)]
        else:
            packaged = args.config_file in (None, f"imagenet/{name}.yaml") and not args.opts
            published = PUBLISHED.get(name) if packaged else None
            subjects = [open_untrained(cfg, name, folder, published)]
        for other in others:
            published = PUBLISHED.get(other) if cfg.INPUT.IMAGE_SIZE == 224 else None
            other_cfg = override(cfg, [f"MODEL.ARCH={other}"])
            subjects.append(open_untrained(other_cfg, other, folder, published))
        rows = compare_paths(
            subjects,
            paths,
            batches=args.batches,
            rounds=args.rounds,
            least_agreement=args.agreement,
        )
    results.write([row.plain(args.batches) for row in rows])
    print(table(rows, args.batches))


@as_config_error
def check_paths(names: Sequence[str]) -> list[str]:
    """Return the ways to measure, "eager" first. Raises ConfigError for an unknown one."""
    for name in names:
        lookup(PATHS, name, "path")
    return list(dict.fromkeys((PLAIN, *names)))


def find_name(args: argparse.Namespace, cfg: CfgNode) -> str:
    """Return the name of the config's model in the results."""
    if args.run:
        return Path(args.run).resolve().name
    file = args.config_file or cfg.MODEL.MODEL_PATH or DEFAULT
    return Path(file).stem if cfg.MODEL.ARCH == "msvit" else cfg.MODEL.ARCH


def table(rows: list[Row], batches: list[int]) -> str:
    """Format the results as a table, with one line per model and way to run it. The column `x` is
    the speedup over running the model in eager mode."""
    head = ["model", "path"]
    for batch in batches:
        head += [f"img/s at {batch}", "x"]
    lines = [[*head, "MiB file", "MiB memory", "agree %", "top-1"]]
    eager = {row.model: row.speed for row in rows if row.path == PLAIN}
    for row in rows:
        cells = [row.model, row.path]
        for batch in batches:
            speed, plain = row.speed.get(batch), eager[row.model].get(batch)
            cells += [shown(speed, 1), shown(speed / plain if speed and plain else None, 2)]
        columns = ((row.size_mib, 1), (row.memory_mib, 0), (row.agreement, 1), (row.top1, 2))
        lines.append([*cells, *(shown(value, digits) for value, digits in columns)])
    text = align(lines, num_left=2).splitlines()
    reasons = ["", *(f"  {row.reason}" if row.reason else "" for row in rows)]
    return "\n".join(line + reason for line, reason in zip(text, reasons))


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    parser = make_arguments()
    try:
        run(parser.parse_intermixed_args())
    except Exception as error:
        if not hasattr(error, "exit_code"):
            raise
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
