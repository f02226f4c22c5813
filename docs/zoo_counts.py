"""Count parameters and MACs of the configs' models, and compare them with the published numbers."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import vil
from vil.config import get_config
from vil.models.arch import StageSpec
from vil.pretrained.catalog import Row

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.005  # relative; larger differences of MACs need a reason


class StageCount(NamedTuple):
    spec: StageSpec
    stage: nn.Module
    grid: tuple[int, int]
    macs: int


class Counted(NamedTuple):
    """A model on the meta device. side: image side in pixels; head: MACs of the head."""

    model: nn.Module
    side: int
    parameters: int
    stages: tuple[StageCount, ...]
    head: int

    @property
    def macs(self) -> int:
        return sum(stage.macs for stage in self.stages) + self.head


@functools.cache
def count(config: str, *options: str) -> Counted:
    """Count the model of a config. options: overrides, KEY=VALUE."""
    cfg = get_config(ROOT / "configs" / config, options)
    with torch.device("meta"):
        model = vil.build_model(cfg)
    side = cfg.INPUT.IMAGE_SIZE
    grids, (*macs, head) = model.grids((side, side)), model.macs((side, side))
    stages = tuple(map(StageCount, model.specs, model.stages, grids, macs))
    return Counted(model, side, sum(p.numel() for p in model.parameters()), stages, head)


def parameters_agree(row: Row) -> bool:
    """Return whether the count rounds to the published number."""
    digits = len(row.parameters.partition(".")[2])
    return (
        not row.parameters or f"{count(row.config).parameters / 1e6:.{digits}f}" == row.parameters
    )


def macs_agree(row: Row, macs: float | None = None) -> bool:
    """Return whether the MACs (default: the config's) are close to the published ones."""
    macs = count(row.config).macs if macs is None else macs
    return not row.macs or abs(macs / (float(row.macs) * 1e9) - 1) <= TOLERANCE


def with_reason(rows: Iterable[Row], why: str) -> Iterator[tuple[Row, Counted]]:
    return ((row, count(row.config)) for row in rows if row.why == why)


# Markdown


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Columns of numbers are right-aligned."""
    rows = list(rows)
    texts = [at == 0 or any("`" in row[at] for row in rows) for at in range(len(header))]
    rule = ["---" if text else "---:" for text in texts]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *rows))


def giga(macs: float) -> str:
    return f"{macs / 1e9:.2f}G"


def mega(parameters: float) -> str:
    return f"{parameters / 1e6:.2f}M"
