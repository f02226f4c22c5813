"""Measure the images per second and peak memory of whole models, and profile a training step.

A way is a combination of settings to run a model with, such as "bf16+nhwc".
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from yacs.config import CfgNode

from vil.bench.model import Contender, Row, measure, plain
from vil.bench.profile import profiled
from vil.builders.attention_backend import backend_requests
from vil.builders.device import amp_dtype, configure_device, memory_format
from vil.builders.model import prepare_for_training
from vil.builders.optim import build_optimizer, build_scaler
from vil.config import override
from vil.engine.distributed import DistInfo
from vil.layers.attention import set_progress
from vil.ops import BACKENDS, choose
from vil.ops.tuning import tuning_cache
from vil.tasks import refuse_without, task_for, with_num_classes
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.lookup import lookup
from vil.utils.train_step import TrainStep
from vil.workflows.benchmark_results import ResultFolder

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
        why = "vil benchmark model measures only classifiers"
        refuse_without(cfg, "resizes_to_image_size", why)
        cfg, self.rounds = with_num_classes(cfg), rounds
        self.name = name if cfg.MODEL.ARCH == "msvit" else cfg.MODEL.ARCH
        self.trials = list_trials(cfg, self.name, ways, backends, beside)
        device = configure_device(cfg)
        tuning_cache.load(device.type)
        self.results = ResultFolder(out, "model", device)
        images = f"{cfg.DATALOADER.BSZ} images of {cfg.INPUT.IMAGE_SIZE} px"
        self.title = self.results.title(f"{len(self.trials)} rows, {images}", rounds)
        self.entries: list[tuple[Row, Contender | None]] = []

    def run(self) -> list[Row]:
        """Measure all models in interleaved rounds and write the results. Returns a row per model
        and combination of settings."""
        self.entries = [make_entry(*trial) for trial in self.trials]
        rows = measure(self.entries, self.rounds)
        self.results.write(plain(rows))
        return rows

    def profile(self) -> Iterator[tuple[str, Path, list]]:
        """Profile a training step of the config's model, in all ways except those with "compile".

        A way is a combination of settings, such as "bf16+nhwc". Call `run` first. Yields (way,
        trace file, costs). costs: a list of `vil.bench.profile.Cost`, the longest time first.
        """
        own = self.entries[0][0].model
        for row, one in self.entries:
            pinned = "pinned" in row.attention
            if row.model != own or one is None or pinned or "compile" in row.way:
                continue
            trace = self.results.folder / f"trace-{row.way}.json.gz"
            costs = profiled(one.train, one.network, one.images.device, trace)
            self.results.write_csv(f"costs-{row.way}", [cost._asdict() for cost in costs])
            yield row.way, trace, costs


def list_trials(
    cfg: CfgNode,
    name: str,
    ways: Sequence[str],
    backends: Sequence[str] | None,
    beside: Sequence[str],
) -> list[tuple[str, str, CfgNode]]:
    """List the measurements of a `ModelBenchmark` as tuples (model name, way, config).

    A way is a combination of settings, such as "bf16+nhwc". The arguments are those of
    `ModelBenchmark`. Raises ValueError for an unknown way or backend.
    """
    keys = {way: [s for part in way.split("+") for s in lookup(WAYS, part, "way")] for way in ways}
    trials = [(name, way, override(cfg, keys[way])) for way in ways]
    for backend in BACKENDS if backends is None else backends:
        lookup(BACKENDS, backend, "backend")
        pinned = [*keys[ways[0]], f"MODEL.VIT.MSVIT.BACKEND={backend}"]
        trials.append((name, ways[0], override(cfg, pinned)))
    for other in beside:
        for way in (way for way in ways if way in PRECISIONS):
            trials.append((other, way, override(cfg, [*keys[way], f"MODEL.ARCH={other}"])))
    return trials


def make_entry(name: str, way: str, cfg: CfgNode) -> tuple[Row, Contender | None]:
    """Build the model of a config for a benchmark, with an optimizer and a batch of random images.

    way: name of the combination of settings, such as "bf16+nhwc". Returns (row, contender): a
    result row without measurements, and the model with its optimizer and batch. If the model cannot
    be built, `contender` is None, and `row.reason` states why.
    """
    backend = cfg.MODEL.VIT.MSVIT.BACKEND
    try:
        device = configure_device(cfg)
        model = task_for(cfg, device).build_model()
        model = prepare_for_training(cfg, model, DistInfo(), device).model
        requests = [r for r in backend_requests(model, cfg, device) if r.case.needs_grad]
        taken = ", ".join(dict.fromkeys(choose(r.case, r.backend) for r in requests))
        optimizer = build_optimizer(cfg, model)
    except ConfigError as error:
        return Row(name, way, backend, reason=str(error)), None
    set_progress(model, TrainStep(cfg.SEED, 0, 0, 1, 1))
    torch.manual_seed(cfg.SEED)
    side, count = cfg.INPUT.IMAGE_SIZE, cfg.DATALOADER.BSZ
    images = torch.randn(count, cfg.INPUT.CHANNELS, side, side, device=device)
    contender = Contender(
        model,
        optimizer,
        build_scaler(cfg, device),
        images.contiguous(memory_format=memory_format(cfg)),
        torch.randint(cfg.DATA.NUM_CLASSES, (count,), device=device),
        amp_dtype(cfg),
        lambda: configure_device(cfg),
    )
    return Row(name, way, taken if backend == "auto" else f"{backend}, pinned"), contender
