"""Report which attention backend runs in each stage of a config's model, and tune the choice."""

import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch
from yacs.config import CfgNode

from vil.builders.attention_backend import BackendRequest, backend_requests
from vil.builders.device import configure_device
from vil.engine.run_dir import PACKAGES
from vil.ops import BACKENDS, explain
from vil.ops.dispatch import CHOICES, describe_crossover
from vil.ops.tuning import tuner, tuning_cache
from vil.tasks import task_for
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.lookup import lookup
from vil.utils.machine import version


class BackendReport(NamedTuple):
    """Report on which attention backend is selected for each request.

    environment: lines with versions, device and threads. verdicts: (request, [(backend, verdict of
    `explain`, description of the backend)]). num_tuned: number of requests with a tuned choice in
    `file`, the tuning cache.
    """

    environment: list[str]
    verdicts: list[tuple[BackendRequest, list[tuple[str, str, str]]]]
    num_tuned: int
    file: str


def requests_of(cfg: CfgNode, device: torch.device) -> list[BackendRequest]:
    """List the local attention calls of the config's model, in training and in evaluation."""
    with torch.device("meta"):
        model = task_for(cfg, device).build_model()
    return backend_requests(model, cfg, device)


def explain_backends(cfg: CfgNode) -> BackendReport:
    """Report which attention backend each stage uses, and why other backends cannot run."""
    device = configure_device(cfg)
    requests = requests_of(cfg, device)
    tuning_cache.load(device.type)
    verdicts = [
        (r, [(name, why, BACKENDS[name].about) for name, why in explain(r.case, r.backend).items()])
        for r in requests
    ]
    tuned = sum(request.case.bucket() in CHOICES for request in requests)
    lines = _environment(device)
    if any(request.case.is_layout for request in requests):
        lines.append(describe_crossover())
    return BackendReport(lines, verdicts, tuned, str(tuning_cache.path()))


def _environment(device: torch.device) -> list[str]:
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return [
        f"python {platform.python_version()} on {platform.platform()}",
        "  ".join(f"{name} {version(name)}" for name in PACKAGES),
        f"device {device}, {torch.get_num_threads()} threads, CUDA: {', '.join(cards) or 'none'}",
    ]


class Tuning:
    """Tuner that finds the fastest attention backend for each request of a config.

    Call `run` for each of `requests`, then `save`.

    backends: the candidates, by default all backends. rounds: number of measurements per candidate.
    max_gib: limit on the memory of a candidate, in GiB. Raises ConfigError for an unknown backend.
    """

    @as_config_error
    def __init__(
        self,
        cfg: CfgNode,
        backends: Sequence[str] | None = None,
        *,
        rounds: int = 7,
        max_gib: float | None = None,
    ):
        if rounds < 1 or not (max_gib is None or max_gib > 0):
            raise ConfigError("--rounds and --max-gib must be positive")
        for name in backends or ():
            lookup(BACKENDS, name, "backend")
        self.device = configure_device(cfg)
        self.requests = requests_of(cfg, self.device)
        self.backends, self.rounds = backends, rounds
        self.max_bytes = None if max_gib is None else max_gib * 2**30
        self.found: dict[str, list] = {}

    def run(self, request: BackendRequest) -> list[str]:
        """Time the candidates for one request. Returns lines of a table, the fastest first."""
        tune = as_config_error(tuner.tune)
        trials = tune(request.case, self.backends, rounds=self.rounds, max_bytes=self.max_bytes)
        if any(not trial.reason for trial in trials):
            self.found[request.case.bucket()] = trials
        return tuner.listing(trials)

    def describe(self, request: BackendRequest) -> str:
        """Describe a request, with the number of images to time if it is below the batch size, and
        a note if tuning has no effect because a backend is pinned."""
        timed, batch = tuner.timed_batch(request.case), request.case.batch
        cut = "" if timed == batch else f", timed with {timed} of {batch} images"
        is_auto = request.backend == "auto"
        return f"{request}{cut}" + (
            "" if is_auto else f" (without effect: {request.backend} is pinned)"
        )

    def save(self) -> str | None:
        """Save the fastest backends in the tuning cache. Returns its path, or None on failure."""
        if tuning_cache.save(self.device.type, self.found):
            return str(tuning_cache.path())
        return None
