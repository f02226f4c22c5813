"""The bridge's part for the backends of local attention: what a config asks for, and what is taken.

Rank 0 decides for all ranks, and what it decided stands in the run's folder: a run that goes on
computes with the backends it began with, whatever was tuned meanwhile.
"""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from yacs.config import CfgNode

from vil.engine import distributed
from vil.engine.distributed import DistInfo
from vil.models.vision_longformer import MsViT
from vil.ops import BACKENDS, Case, choose, explain
from vil.ops.dispatch import CHOICES, tuned
from vil.ops.tuning import tuner, tuning_cache
from vil.tasks.detection.models.detectors import PerImageDetector
from vil.utils.atomic_write import replace_text

log = logging.getLogger(__name__)
FILE = "autotune.json"  # in the run's folder
LARGE = 1024  # tokens of a side: a picture of 4096 pixels


class Asked(NamedTuple):
    """One thing that backends are asked for by a stage."""

    stage: int
    case: Case
    backend: str  # pinned, or auto

    def __str__(self) -> str:
        window = self.case.window
        seen = {1: "the own chunk", 2: "the own chunk and one neighbour"}
        return (
            f"stage {self.stage}: {window.grid[0]} x {window.grid[1]} tokens, w {window.size}, "
            f"{seen.get(len(window.offsets), 'all nine chunks')}, "
            f"{'training' if self.case.needs_grad else 'evaluation'}"
        )


def attention_cases(
    model: nn.Module,
    cfg: CfgNode,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    training: bool,
    world: int,
) -> Iterator[Asked]:
    """What backends are asked for by one of `world` processes: in evaluation and, with `training`,
    in training by neighbour mode.

    dtype: that of autocast, None for full precision.
    """
    padded = isinstance(model, PerImageDetector)
    model = network_in(model)
    if not isinstance(model, MsViT):
        return
    batch = max(1, cfg.DATALOADER.BSZ // world)
    facts = dict(batch=batch, dtype=dtype or torch.float32, device=device.type, padded=padded)
    grids = model.grids((cfg.INPUT.IMAGE_SIZE,) * 2)
    for number, (stage, grid) in enumerate(zip(model.stages, grids), start=1):
        kinds = {type(block.attn): block.attn for block in stage.blocks}
        for attention in kinds.values():
            for case in attention.backend_cases(grid, training=training, **facts):
                yield Asked(number, case, attention.backend)


def network_in(model: nn.Module) -> nn.Module:
    """The network with the attention: a detector's body, else the model."""
    return model.backbone.body if isinstance(model, PerImageDetector) else model


def pin(network: nn.Module, asked: list[Asked]) -> None:
    """One backend for images of every size, by stage: that of the usual size or, where it has a
    limit, the first preferred without one. So a new size changes nothing but the time."""
    for a in asked:
        if a.case.needs_grad != asked[0].case.needs_grad:
            continue  # settled by training, where there is some
        large = replace(a.case, window=replace(a.case.window, grid=(LARGE, LARGE)))
        name = choose(a.case, a.backend)
        if name != a.backend and BACKENDS[name].unsupported(large):
            name = choose(large)
        for block in network.stages[a.stage - 1].blocks:
            if block.attn.backend:
                block.attn.backend = name


def settle(
    asked: list[Asked],
    ranks: DistInfo,
    *,
    folder: Path | None = None,
    begun: bool = False,
    tune: bool = False,
    say: Callable[[str], None] = log.info,
) -> None:
    """Set the choices of this process: those that a run that has begun kept in its folder, else
    those that `vil tune` left for this user, with `tune` completed by measuring now; and keep them
    in the folder."""
    automatic = [a for a in asked if a.backend == "auto"]
    if tune and asked and not automatic:
        log.warning("TUNE has no effect: the backend %s is pinned", asked[0].backend)
    CHOICES.clear()
    if ranks.is_main:
        kept = _kept(folder) if begun else None
        CHOICES.update(_of_user(automatic) if kept is None else kept)
        if tune:
            _complete(automatic, say)
    found = distributed.broadcast_object(dict(CHOICES))
    CHOICES.clear()
    CHOICES.update(found)
    if folder and ranks.is_main:
        try:
            replace_text(folder / FILE, json.dumps(CHOICES, indent=1) + "\n")
        except OSError as error:
            log.warning("%s cannot be written: %s", folder / FILE, error.strerror or error)
    for a in automatic:
        wanted = CHOICES.get(a.case.bucket())
        if wanted and tuned(a.case) != wanted:
            entry = BACKENDS.get(wanted)
            why = "; ".join(entry.unsupported(a.case)) if entry else "there is no such backend now"
            log.warning("%s: %s was chosen, but %s", a, wanted, why)
    for a in asked:
        name = choose(a.case, a.backend)
        how = explain(a.case, a.backend)[name].removeprefix("chosen")
        say(f"{a}: {name}{how}")


def _kept(folder: Path) -> dict[str, str] | None:
    """The choices that a run began with; None if it has none that can be read."""
    file = folder / FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is ignored: %s", file, error)
        return None
    if isinstance(found, dict) and all(isinstance(name, str) for name in found.values()):
        return found
    log.warning("%s is ignored: it is not a table of backends", file)
    return None


def _of_user(asked: list[Asked]) -> dict[str, str]:
    """What `vil tune` left for this user, of what is asked for."""
    if asked:
        tuning_cache.load(asked[0].case.device)
    return tuning_cache.for_cases(a.case.bucket() for a in asked)


def _complete(asked: list[Asked], say: Callable[[str], None]) -> None:
    """Measure what is not known yet, and leave it to the user's other runs too."""
    found = {}
    for a in asked:
        if a.case.bucket() not in CHOICES:
            say(f"{a}: trying backends")
            found[a.case.bucket()] = trials = tuner.tune(a.case)
            for line in tuner.listing(trials):
                say(line)
    if found:
        tuning_cache.save(asked[0].case.device, found)
