"""The bridge's part for the backends of local attention: what a config asks for, and what is taken.

Rank 0 decides for all ranks, and what it decided stands in the run's folder: a run that goes on
computes with the backends it began with, whatever was tuned meanwhile.
"""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from yacs.config import CfgNode

from vil.engine import distributed
from vil.engine.distributed import Ranks
from vil.layers.attention.longformer import LongformerAttention
from vil.models.msvit import MsViT
from vil.ops import Case, autotune, choices, choose, explain
from vil.ops.dispatch import CHOICES
from vil.ops.window import NEIGHBOURS
from vil.utils.files import replace_text

log = logging.getLogger(__name__)
FILE = "autotune.json"  # in the run's folder


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
    model: nn.Module, cfg: CfgNode, device: torch.device, dtype: torch.dtype | None
) -> Iterator[Asked]:
    """What backends are asked for, in training by neighbour mode, and in evaluation.

    dtype: that of autocast, None for full precision. Of the eight neighbours of random shift one
    stands for all.
    """
    if not isinstance(model, MsViT):
        return
    facts = dict(batch=cfg.DATALOADER.BSZ, dtype=dtype or torch.float32, device=device.type)
    grids = model.grids((cfg.INPUT.IMAGE_SIZE,) * 2)
    for number, (stage, grid) in enumerate(zip(model.stages, grids), start=1):
        kinds = {type(block.attn): block.attn for block in stage.blocks}
        if attention := kinds.get(LongformerAttention):
            for mode in attention.modes():
                case = attention.case(grid, mode, training=True, **facts)
                if len(case.window.offsets) != 2 or case.window.offsets[1] == NEIGHBOURS[0]:
                    yield Asked(number, case, attention.backend)
            case = attention.case(grid, min(attention.mode, 0), training=False, **facts)
            yield Asked(number, case, attention.backend)


def settle(
    asked: list[Asked],
    ranks: Ranks,
    *,
    folder: Path | None = None,
    tune: bool = False,
    say: Callable[[str], None] = log.info,
) -> None:
    """Set the choices of this process: those kept in the run's folder, else those that `vil tune`
    left for this user, with `tune` completed by measuring now; and keep them in the folder."""
    automatic = [a for a in asked if a.backend == "auto"]
    found = None
    if ranks.is_main:
        found = _kept(folder) if folder else None
        if found is None:
            found = _known(automatic, say if tune else None)
    CHOICES.clear()
    CHOICES.update(distributed.from_main(found))
    if folder and ranks.is_main:
        replace_text(folder / FILE, json.dumps(CHOICES, indent=1) + "\n")
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
    except (OSError, ValueError) as error:
        log.warning("%s is ignored: %s", file, error)
        return None
    if isinstance(found, dict) and all(isinstance(name, str) for name in found.values()):
        return found
    log.warning("%s is ignored: it is not a table of backends", file)
    return None


def _known(asked: list[Asked], tune: Callable[[str], None] | None) -> dict[str, str]:
    """The user's choices; with `tune`, which is told about it, the missing ones are measured."""
    if not asked:
        return {}
    device = asked[0].case.device
    choices.load(device)
    found = {}
    for a in asked if tune else ():
        if a.case.bucket() not in CHOICES:
            tune(f"{a}: trying backends")
            found[a.case.bucket()] = autotune.tune(a.case)
    if found:
        choices.save(device, found)
    return choices.for_cases(a.case.bucket() for a in asked)
