"""Which backend computes local attention: what a config requests, and what is selected.

Rank 0 decides for all ranks and keeps its decision in the run's folder: a resumed run computes with
the backends it started with, whatever was tuned meanwhile.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from yacs.config import CfgNode

from vil.builders.device import amp_dtype
from vil.engine import distributed
from vil.engine.distributed import DistInfo
from vil.models.vision_longformer import MsViT
from vil.ops import BACKENDS, Case, choose, explain
from vil.ops.dispatch import CHOICES, tuned
from vil.ops.tuning import tuner, tuning_cache
from vil.utils.atomic_write import replace_text
from vil.utils.errors import as_config_error

log = logging.getLogger(__name__)
FILE = "autotune.json"  # in the run's folder
LARGE = 1024  # tokens of a side: an image of 4096 pixels


class BackendRequest(NamedTuple):
    """A case of local attention that a stage computes."""

    stage: int
    case: Case
    backend: str  # pinned, or auto

    def __str__(self) -> str:
        window = self.case.window
        visible = {1: "the self chunk", 2: "the self chunk and one neighbor"}
        return (
            f"stage {self.stage}: {window.grid[0]} x {window.grid[1]} tokens, w {window.size}, "
            f"{visible.get(len(window.offsets), 'all nine chunks')}, "
            f"{'training' if self.case.needs_grad else 'evaluation'}"
        )


def attention_network(model: nn.Module) -> nn.Module:
    """The network that has the attention: a detector's `attention_body`, else the model itself."""
    return getattr(model, "attention_body", model)


def backend_requests(
    model: nn.Module, cfg: CfgNode, device: torch.device, *, training: bool = True, world: int = 1
) -> list[BackendRequest]:
    """The cases that one of `world` processes computes: in evaluation and, with `training`, in
    training by neighbor mode, where one neighbor of random shift stands for all eight."""
    network = attention_network(model)
    if not isinstance(network, MsViT):
        return []
    spec = dict(
        batch=max(1, cfg.DATALOADER.BSZ // world),
        dtype=amp_dtype(cfg) or torch.float32,
        device=device.type,
        padded=network is not model,
    )
    requests, grids = [], network.grids((cfg.INPUT.IMAGE_SIZE,) * 2)
    for number, (stage, grid) in enumerate(zip(network.stages, grids), start=1):
        kinds = {type(block.attn): block.attn for block in stage.blocks}
        for attention in kinds.values():
            for case in attention.backend_cases(grid, training=training, **spec):
                requests.append(BackendRequest(number, case, attention.backend))
    return requests


@as_config_error
def select_attention_backends(
    model: nn.Module,
    cfg: CfgNode,
    device: torch.device,
    dist: DistInfo,
    *,
    training: bool,
    folder: Path | None = None,
    resuming: bool = False,
    say: Callable[[str], None] = log.info,
) -> None:
    """Select the backends of this process: those that a resumed run keeps in its folder, else those
    that `vil tune` found for this user; with MODEL.VIT.MSVIT.TUNE what is missing is measured now.

    The selection is the same on every rank, and is written to the folder.
    """
    requests = backend_requests(model, cfg, device, training=training, world=dist.world)
    automatic = [r for r in requests if r.backend == "auto"]
    tune = training and cfg.MODEL.VIT.MSVIT.TUNE
    if tune and requests and not automatic:
        log.warning("TUNE has no effect: the backend %s is pinned", requests[0].backend)
    CHOICES.clear()
    if dist.is_main:
        kept = _read_kept(folder) if resuming else None
        if kept is None and automatic:
            tuning_cache.load(device.type)
            buckets = {request.case.bucket() for request in automatic}
            kept = {bucket: name for bucket, name in CHOICES.items() if bucket in buckets}
        CHOICES.update(kept or {})
        if tune:
            _tune_missing(automatic, say)
    selected = distributed.broadcast_object(dict(CHOICES))
    CHOICES.clear()
    CHOICES.update(selected)
    if folder and dist.is_main:
        try:
            replace_text(folder / FILE, json.dumps(CHOICES, indent=1) + "\n")
        except OSError as error:
            log.warning("%s cannot be written: %s", folder / FILE, error.strerror or error)
    _report(requests, say)
    if attention_network(model) is not model:  # a detector, which sees images of many sizes
        pin_for_all_sizes(attention_network(model), requests)


def pin_for_all_sizes(network: nn.Module, requests: list[BackendRequest]) -> None:
    """Pin one backend per stage for images of every size: that of the usual size or, where it has a
    limit, the first preferred one without. So a new size changes nothing but the time."""
    for request in requests:
        if request.case.needs_grad != requests[0].case.needs_grad:
            continue  # decided by training, where there is some
        case = request.case
        large = replace(case, window=replace(case.window, grid=(LARGE, LARGE)))
        name = choose(case, request.backend)
        if name != request.backend and BACKENDS[name].unsupported(large):
            name = choose(large)
        for block in network.stages[request.stage - 1].blocks:
            if block.attn.backend:
                block.attn.backend = name


def _report(requests: list[BackendRequest], say: Callable[[str], None]) -> None:
    """Log the backend of each request, and warn where a tuned choice cannot run."""
    for request in requests:
        case, wanted = request.case, CHOICES.get(request.case.bucket())
        if request.backend == "auto" and wanted and tuned(case) != wanted:
            entry = BACKENDS.get(wanted)
            why = "; ".join(entry.unsupported(case)) if entry else "there is no such backend now"
            log.warning("%s: %s was chosen, but %s", request, wanted, why)
    for request in requests:
        name = choose(request.case, request.backend)
        how = explain(request.case, request.backend)[name].removeprefix("chosen")
        say(f"{request}: {name}{how}")


def _read_kept(folder: Path) -> dict[str, str] | None:
    """The choices that a run started with; None if it has none that can be read."""
    file = folder / FILE
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is ignored: %s", file, error)
        return None
    if isinstance(kept, dict) and all(isinstance(name, str) for name in kept.values()):
        return kept
    log.warning("%s is ignored: it is not a table of backends", file)
    return None


def _tune_missing(requests: list[BackendRequest], say: Callable[[str], None]) -> None:
    """Measure what is not known yet, and keep it for the user's other runs too."""
    found = {}
    for request in requests:
        bucket = request.case.bucket()
        if bucket not in CHOICES:
            say(f"{request}: trying backends")
            found[bucket] = trials = tuner.tune(request.case)
            for line in tuner.listing(trials):
                say(line)
    if found:
        tuning_cache.save(requests[0].case.device, found)
