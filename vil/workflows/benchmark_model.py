"""Measure the images per second and peak memory of whole models, and profile a training step.

A way is a combination of settings to run a model with, such as "bf16+nhwc". All models are measured
in interleaved rounds. The time of a training step includes cross entropy and the optimizer update,
but not the copy of the batch to the device. Peak memory does not include weights, optimizer state
and images.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.profiler_util import FunctionEvent
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function
from yacs.config import CfgNode

from vil.config import override
from vil.engine.build import configure_device
from vil.engine.distributed import DistInfo
from vil.layers.attention import set_progress
from vil.ops import BACKENDS, choose
from vil.ops.tuning import tuning_cache
from vil.optim.build import build_optimization
from vil.tasks import FEWEST_CLASSES, refuse_without, task_for, with_num_classes
from vil.utils.errors import ConfigError, as_config_error, one_line
from vil.utils.interleaved_timer import MILLI, Candidate, time_interleaved
from vil.utils.lookup import lookup
from vil.utils.timing import peak_tensor_bytes, synchronize
from vil.utils.train_step import TrainStep
from vil.workflows.attention_backend import backend_requests
from vil.workflows.benchmark_results import ResultFolder
from vil.workflows.execution import execution_of
from vil.workflows.prepare import prepare_for_training

MIB = 2**20
MICRO = 1e-6
# The parts of a way, which are joined by "+", and the config settings that each part makes.
WAYS = {
    "fp32": ["AMP.ENABLED=False", "AMP.TF32=False"],
    "tf32": ["AMP.ENABLED=False", "AMP.TF32=True"],
    "bf16": ["AMP.ENABLED=True", "AMP.DTYPE=bfloat16"],
    "fp16": ["AMP.ENABLED=True", "AMP.DTYPE=float16"],
    "nchw": ["AMP.MEMORY_FORMAT=nchw"],
    "nhwc": ["AMP.MEMORY_FORMAT=nhwc"],
    "compile": ["MODEL.COMPILE=True"],
    "checkpoint": ["MODEL.GRAD_CHECKPOINT=True"],
    "reversible": ["MODEL.VIT.REVERSIBLE=True"],
}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


class ModelBenchmark:
    """Benchmark of a config's model and of other models to compare it with.

    name: name of the model in the results.
    ways: combinations of settings to run the model with, such as "bf16+nhwc".
    backends: attention backends to compare, by default all. With each backend, the config's model
    is measured in the first of `ways`.
    beside: other models, as values of MODEL.ARCH. They run only with those `ways` that set nothing
    but a precision, such as "bf16".
    rounds: number of measurements.
    out: folder for the results.

    Raises ConfigError for an unknown way or backend.
    """

    @as_config_error
    def __init__(
        self,
        cfg: CfgNode,
        name: str,
        *,
        ways: Sequence[str],
        backends: Sequence[str] | None = None,
        beside: Sequence[str] = (),
        rounds: int = 9,
        out: str | None = None,
    ):
        why = "vil benchmark model needs images of one size, INPUT.IMAGE_SIZE"
        refuse_without(cfg.TASK, "resizes_to_image_size", why)
        cfg, self.rounds = with_num_classes(cfg, FEWEST_CLASSES), rounds
        self.name = name if cfg.MODEL.ARCH == "msvit" else cfg.MODEL.ARCH
        words = list_trials(self.name, ways, backends, beside)
        self.trials = [(model, way, override(cfg, keys)) for model, way, keys in words]
        device = configure_device(cfg)
        tuning_cache.load(device.type)
        self.results = ResultFolder(out, "model", device)
        images = f"{cfg.DATALOADER.BSZ} images of {cfg.INPUT.IMAGE_SIZE} px"
        self.title = self.results.title(f"{len(self.trials)} rows, {images}", rounds)
        self.entries: list[tuple[Row, Contender | None]] = []

    def run(self) -> list["Row"]:
        """Measure all models in interleaved rounds and write the results. Returns a row per model
        and combination of settings."""
        self.entries = [make_entry(*trial) for trial in self.trials]
        rows = measure(self.entries, self.rounds)
        self.results.write([vars(row) for row in rows])
        return rows

    def profile(self) -> Iterator[tuple[str, Path, list["Cost"]]]:
        """Profile a training step of the config's model, in all ways except those with "compile".
        Call `run` first. Yields (way, trace file, costs), the longest time first."""
        for row, contender in self.entries:
            pinned = "pinned" in row.attention
            if row.model != self.name or contender is None or pinned or "compile" in row.way:
                continue
            trace = self.results.folder / f"trace-{row.way}.json.gz"
            device = contender.images.device
            costs = profile_step(contender.train, contender.network, device, trace)
            self.results.write_csv(f"costs-{row.way}", [cost._asdict() for cost in costs])
            yield row.way, trace, costs


def list_trials(
    name: str, ways: Sequence[str], backends: Sequence[str] | None, beside: Sequence[str]
) -> list[tuple[str, str, list[str]]]:
    """List the measurements of a `ModelBenchmark` as tuples (model name, way, changes to the
    config). Raises ValueError for an unknown way or backend."""
    keys = {way: [s for part in way.split("+") for s in lookup(WAYS, part, "way")] for way in ways}
    trials = [(name, way, keys[way]) for way in ways]
    for backend in BACKENDS if backends is None else backends:
        lookup(BACKENDS, backend, "backend")
        trials.append((name, ways[0], [*keys[ways[0]], f"MODEL.VIT.MSVIT.BACKEND={backend}"]))
    for other in beside:
        for way in (way for way in ways if way in PRECISIONS):
            trials.append((other, way, [*keys[way], f"MODEL.ARCH={other}"]))
    return trials


def make_entry(name: str, way: str, cfg: CfgNode) -> tuple["Row", "Contender | None"]:
    """Build the model of a config with an optimizer and a batch of random images.

    Returns (row, contender): a row without measurements, and what to measure. If the model cannot
    be built, `contender` is None, and `row.reason` states why.
    """
    backend = cfg.MODEL.VIT.MSVIT.BACKEND
    try:
        device = configure_device(cfg)
        model, execution = task_for(cfg, device).build_model(), execution_of(cfg, device)
        model = prepare_for_training(model, execution, DistInfo()).model
        requests = [r for r in backend_requests(model, execution) if r.case.needs_grad]
        taken = ", ".join(dict.fromkeys(choose(r.case, r.backend) for r in requests))
        optim = build_optimization(cfg, model, device)
    except ConfigError as error:
        return Row(name, way, backend, reason=str(error)), None
    set_progress(model, TrainStep(cfg.SEED, 0, 0, 1, 1))
    torch.manual_seed(cfg.SEED)
    side, count = cfg.INPUT.IMAGE_SIZE, cfg.DATALOADER.BSZ
    images = torch.randn(count, cfg.INPUT.CHANNELS, side, side, device=device)
    contender = Contender(
        model,
        optim.optimizer,
        optim.scaler,
        images.contiguous(memory_format=execution.memory_format),
        torch.randint(cfg.DATA.NUM_CLASSES, (count,), device=device),
        execution.amp_dtype,
        lambda: configure_device(cfg),
    )
    return Row(name, way, taken if backend == "auto" else f"{backend}, pinned"), contender


# ------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Contender:
    """A model to measure, with its batch and settings.

    images: (B, c, H, W), on the model's device and in its memory format. targets: classes (B,).
    amp_dtype: the autocast dtype; None for no autocast. switch: called before each pass to apply
    the global torch settings of this model, such as TF32.
    """

    network: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    images: Tensor
    targets: Tensor
    amp_dtype: torch.dtype | None = None
    switch: Callable[[], object] = lambda: None

    def evaluate(self) -> Tensor:
        """Return the logits (B, classes) of the images in eval mode, without gradients."""
        self.switch()
        self.network.eval()
        with torch.no_grad(), self.autocast():
            return self.network(self.images)

    def train(self) -> None:
        """Run one training step on the images."""
        self.switch()
        self.network.train()
        self.optimizer.zero_grad()
        with self.autocast():
            outputs = self.network(self.images)
            parts = [outputs] if isinstance(outputs, Tensor) else outputs
            if len(parts) == 1 and parts[0].ndim == 2:
                loss = F.cross_entropy(parts[0], self.targets)
            else:  # of pretraining
                loss = sum(each.float().square().mean() for each in parts)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def autocast(self) -> torch.autocast:
        device_type = self.images.device.type
        return torch.autocast(device_type, self.amp_dtype, enabled=self.amp_dtype is not None)


@dataclass
class Row:
    """Measurements of a model with one combination of settings.

    way: the settings, such as "bf16+nhwc". attention: the backends of the stages in training.
    evaluation, training: images per second. over_evaluation, over_training: these speeds divided by
    those of the first row. evaluation_mib, training_mib: peak memory. reason: why measurements are
    missing.
    """

    model: str
    way: str
    attention: str
    batch: int = 0
    rounds: int = 0
    evaluation: float | None = None
    training: float | None = None
    over_evaluation: float | None = None
    over_training: float | None = None
    evaluation_mib: float | None = None
    training_mib: float | None = None
    reason: str = ""


def measure(entries: Sequence[tuple[Row, Contender | None]], rounds: int) -> list[Row]:
    """Measure models in interleaved rounds, and store the results in their rows. Returns all rows.

    entries: (row, model to measure) pairs. The model is None if `row.reason` already states why
    there is nothing to measure.
    """
    contenders = {str(number): one for number, (_, one) in enumerate(entries) if one is not None}
    candidates = {
        name: Candidate(one.evaluate, lambda _, one=one: one.train())
        for name, one in contenders.items()
    }
    devices = [one.images.device for one in contenders.values()]
    times, dropped = time_interleaved(candidates, rounds, next(iter(devices), torch.device("cpu")))
    rows = [row for row, _ in entries]
    for name, one in contenders.items():
        row, batch = rows[int(name)], len(one.images)
        if name in dropped:
            row.reason = dropped[name]
            continue
        row.batch, row.rounds = batch, len(times[name].forward)
        row.evaluation = batch * MILLI / times[name].forward_ms
        row.training = batch * MILLI / times[name].backward_ms
        if rows[0].training:
            row.over_evaluation = row.evaluation / rows[0].evaluation
            row.over_training = row.training / rows[0].training
        try:
            row.evaluation_mib = peak_tensor_bytes(one.evaluate, devices[0]) / MIB
            row.training_mib = peak_tensor_bytes(one.train, devices[0]) / MIB
        except Exception as error:
            row.evaluation_mib, row.reason = None, f"memory: {one_line(error)}"
    return rows


# ------------------------------------------------------------------------------------ profiling

MODULE = "module: "
BACKWARD = "autograd::engine::evaluate_function: "
OUTSIDE = "(model)"  # name for operations outside any submodule


class Cost(NamedTuple):
    """Total time of one operator in one module, excluding the time of operators that it calls.

    module: its name, with "*" for block numbers, as in `stages.2.blocks.*.mlp.fc1`, so that the
    blocks of a stage are summed. way: the pass in which the operator ran, "forward" or "backward".
    calls: number of calls. seconds: total time. share: fraction of the time of all operators.
    """

    module: str
    way: str
    operator: str
    calls: int
    seconds: float
    share: float


def profile_step(
    step: Callable[[], object], model: nn.Module, device: torch.device, trace: Path
) -> list[Cost]:
    """Profile one training step after a warm-up step. Returns the costs, longest time first.

    trace: file to write for chrome://tracing or Perfetto, compressed if its name ends in .gz. The
    times are device times on CUDA, otherwise CPU times. Raises ConfigError if the profiler records
    no times.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
    step()
    with labeled_modules(model), profile(activities=activities, acc_events=True) as record:
        step()
        synchronize(device)
    record.export_chrome_trace(str(trace))
    modules: dict[int, str] = {}  # by the number of an operation in the forward pass
    events = [event for event in record.events() if not event.name.startswith((MODULE, BACKWARD))]
    for event in sorted(events, key=lambda event: event.time_range.start):
        # Operations without a gradient have the number of the next one with a gradient, which
        # overwrites theirs here.
        label = find_label(event)
        if event.sequence_nr >= 0 and not is_backward(label):
            modules[event.sequence_nr] = module_of(label)
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in events:
        label = find_label(event)
        if is_backward(label):  # it has the number of the operation whose gradient it computes
            module, way = modules.get(label.sequence_nr, OUTSIDE), "backward"
        else:
            module, way = module_of(label), "forward"
        micros = event.self_device_time_total if cuda else event.self_cpu_time_total
        times[module, way, event.name].append(micros * MICRO)
    total = sum(map(sum, times.values()))
    if not total:
        raise ConfigError(
            f"the profiler recorded no times on {device.type}: allow this process to read the "
            "device's performance counters, or profile with DEVICE cpu"
        )
    costs = [Cost(*key, len(t), sum(t), sum(t) / total) for key, t in times.items()]
    return sorted(costs, key=lambda cost: -cost.seconds)


@contextmanager
def labeled_modules(model: nn.Module) -> Iterator[None]:
    """Label the forward pass of each submodule in the profiler's trace."""
    hooks, running = [], []

    def enter(name: str) -> None:
        running.append(record_function(MODULE + name))
        running[-1].__enter__()

    for path, module in model.named_modules():
        if path:
            name = re.sub(r"(?<=\bblocks\.)\d+", "*", path)
            hooks += [
                module.register_forward_pre_hook(lambda *_, name=name: enter(name)),
                module.register_forward_hook(lambda *_: running.pop().__exit__(None, None, None)),
            ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def find_label(event: FunctionEvent) -> FunctionEvent | None:
    """Return the innermost event around an operation that is the forward pass of a module, or the
    backward pass of an operation; None if there is none."""
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith((MODULE, BACKWARD)):
        parent = parent.cpu_parent
    return parent


def is_backward(label: FunctionEvent | None) -> bool:
    return label is not None and label.name.startswith(BACKWARD)


def module_of(label: FunctionEvent | None) -> str:
    return OUTSIDE if label is None else label.name.removeprefix(MODULE)
