"""Report which attention backend runs in each stage of a model, and measure which is fastest."""

import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch
from yacs.config import CfgNode

from vil.engine.build import configure_device
from vil.engine.run_dir import PACKAGES
from vil.ops import BACKENDS, explain
from vil.ops.dispatch import CHOICES
from vil.ops.native import library
from vil.ops.tuning import tuner, tuning_cache
from vil.ops.tuning.linear_tuner import tune_linear
from vil.tasks import FEWEST_CLASSES, task_for, with_num_classes
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.lookup import lookup
from vil.utils.machine import version
from vil.workflows.attention_backend import (
    BackendRequest,
    attention_network,
    backend_requests,
    pads_images,
)
from vil.workflows.execution import execution_of
from vil.workflows.linear_backend import LinearRequest, describe_linears, linear_requests


class BackendReport(NamedTuple):
    """A report that names the attention backend of each local attention call of a model.

    environment: lines of text on package versions, device, threads and the native library.
    verdicts: (request, backends) for each attention call. `backends` has (name, verdict,
    description) of every backend. A verdict begins with "chosen" or "could run", or gives the
    reasons why the backend cannot run the call.
    num_tuned: number of attention calls whose fastest backend is in the tuning cache.
    file: path of the tuning cache.
    linears: lines of text on the linear layers and MLPs that run as compiled C++ code.
    """

    environment: list[str]
    verdicts: list[tuple[BackendRequest, list[tuple[str, str, str]]]]
    num_tuned: int
    file: str
    linears: list[str]

    def summary(self) -> list[str]:
        """Summarize the report as lines of text.

        A line per stage names the attention backends that are chosen in training and in evaluation.
        The lines of `linears` follow.
        """
        stages: dict[int, list[str]] = {}
        for request, verdicts in self.verdicts:
            grid = request.case.window.grid
            phase = "training" if request.case.needs_grad else "evaluation"
            start = f"stage {request.stage}: {grid[0]} x {grid[1]} tokens"
            chosen = [
                f"{name}{verdict.removeprefix('chosen')} in {phase}"
                for name, verdict, _ in verdicts
                if verdict.startswith("chosen")
            ]
            stages.setdefault(request.stage, [start]).extend(chosen or [f"none in {phase}"])
        lines = [f"{start}: {'; '.join(chosen)}" for start, *chosen in stages.values()]
        return lines + self.linears


class ModelCalls(NamedTuple):
    """The calls of a model that backends can run, in training and in evaluation.

    attention: calls of local attention. linears: calls of linear layers and MLPs; empty unless
    `device` is a CPU.
    """

    device: torch.device
    attention: list[BackendRequest]
    linears: list[LinearRequest]


@as_config_error
def find_calls(cfg: CfgNode) -> ModelCalls:
    """List the calls of the config's model that backends can run."""
    device = configure_device(cfg)
    cfg = with_num_classes(cfg, FEWEST_CLASSES)
    with torch.device("meta"):
        model = task_for(cfg, device).build_model()
    network, execution = attention_network(model), execution_of(cfg, device)
    linears = linear_requests(network, execution, padded=pads_images(model))
    return ModelCalls(device, backend_requests(model, execution), linears)


@as_config_error
def explain_backends(calls: ModelCalls) -> BackendReport:
    """Report which attention backend runs each local attention call of a model, and which other
    backends could run it, or why they cannot."""
    device, requests, linears = calls
    environment = _environment(device)  # first, because it loads the native library
    tuning_cache.load(device.type)
    verdicts = [
        (r, [(name, why, BACKENDS[name].about) for name, why in explain(r.case, r.backend).items()])
        for r in requests
    ]
    tuned = sum(request.case.bucket() in CHOICES for request in requests)
    return BackendReport(
        environment=environment,
        verdicts=verdicts,
        num_tuned=tuned,
        file=str(tuning_cache.path()),
        linears=describe_linears(linears),
    )


def _environment(device: torch.device) -> list[str]:
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = next((f"{name} {number}" for name, number in builds.items() if number), "CPUs only")
    return [
        f"python {platform.python_version()} on {platform.platform()}",
        "  ".join(f"{name} {version(name)}" for name in PACKAGES),
        f"device {device}, {torch.get_num_threads()} threads, GPUs: {', '.join(cards) or 'none'} "
        f"(torch is built for {built})",
        f"native library: {library.describe()}",
    ]


class Tuning:
    """Tuner that finds the fastest backend for each local attention call of a model and, on a CPU,
    for each linear layer and MLP.

    Call `run` for each item of `requests` (attention calls), `run_linear` for each item of
    `linears`, then `save`.

    backends: names of the attention backends to time, by default all. Linear layers and MLPs are
    timed only if "native" is one of them. rounds: number of measurements. max_gib: backends with a
    higher estimated memory are not timed. Raises ConfigError for an unknown backend.
    """

    @as_config_error
    def __init__(
        self,
        calls: ModelCalls,
        backends: Sequence[str] | None = None,
        *,
        rounds: int = 7,
        max_gib: float | None = None,
    ):
        if rounds < 1 or not (max_gib is None or max_gib > 0):
            given = f"--rounds {rounds}" + ("" if max_gib is None else f", --max-gib {max_gib}")
            raise ConfigError(f"--rounds and --max-gib must be positive, got {given}")
        for name in backends or ():
            lookup(BACKENDS, name, "backend")
        self.device, self.requests, linears = calls
        timed = backends is None or "native" in backends
        self.linears = [each for each in linears if timed and not each.case.unsupported()]
        self.backends, self.rounds = backends, rounds
        self.max_bytes = None if max_gib is None else max_gib * 2**30
        self.found: dict[str, list] = {}

    def run(self, request: BackendRequest) -> list[str]:
        """Time the backends on one local attention call, an item of `requests`. Returns the lines
        of a table, the fastest backend first."""
        tune = as_config_error(tuner.tune)
        trials = tune(request.case, self.backends, rounds=self.rounds, max_bytes=self.max_bytes)
        if any(not trial.reason for trial in trials):
            self.found[request.case.bucket()] = trials
        return tuner.listing(trials)

    def run_linear(self, request: LinearRequest) -> list[str]:
        """Time the backends of a linear layer or an MLP. Returns the lines of a table, the fastest
        backend first."""
        self.found[request.case.bucket()] = trials = tune_linear(request.case, rounds=self.rounds)
        return tuner.listing(trials)

    def describe(self, request: BackendRequest) -> str:
        """Describe a local attention call in one line.

        The line has a remark if `run` times the call with fewer images than a batch of the config.
        It has another remark if the config sets a backend, so that tuning has no effect.
        """
        timed, batch = tuner.timed_batch(request.case), request.case.batch
        cut = "" if timed == batch else f", timed with {timed} of {batch} images"
        is_auto = request.backend == "auto"
        return f"{request}{cut}" + (
            "" if is_auto else f" (no effect: the config sets the backend {request.backend})"
        )

    def save(self) -> str | None:
        """Save the fastest backend for each timed call in the tuning cache. Returns the path of the
        cache file, or None if the file cannot be written."""
        if tuning_cache.save(self.device.type, self.found):
            return str(tuning_cache.path())
        return None
