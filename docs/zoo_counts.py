"""What was published of each model, and the counts of the config's model."""

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
TOLERANCE = 0.005  # published multiply-accumulates are this near, or there is a reason


class StageCount(NamedTuple):
    spec: StageSpec
    stage: nn.Module
    grid: tuple[int, int]
    macs: int


class Counted(NamedTuple):
    """A model on the meta device. side: of the image, in pixels; stages, then the head's MACs."""

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
    """options: KEY=VALUE, for a model beside the config's own."""
    cfg = get_config(ROOT / "configs" / config, options)
    with torch.device("meta"):
        model = vil.build_model(cfg)
    side = cfg.INPUT.IMAGE_SIZE
    grids, (*macs, head) = model.grids((side, side)), model.macs((side, side))
    stages = tuple(map(StageCount, model.specs, model.stages, grids, macs))
    return Counted(model, side, sum(p.numel() for p in model.parameters()), stages, head)


def parameters_agree(row: Row) -> bool:
    """Whether the count rounds to the published figure."""
    digits = len(row.parameters.partition(".")[2])
    return (
        not row.parameters or f"{count(row.config).parameters / 1e6:.{digits}f}" == row.parameters
    )


def macs_agree(row: Row, macs: float | None = None) -> bool:
    """Whether these multiply-accumulates, the config's if not given, are near the published."""
    macs = count(row.config).macs if macs is None else macs
    return not row.macs or abs(macs / (float(row.macs) * 1e9) - 1) <= TOLERANCE


def with_reason(rows: Iterable[Row], why: str) -> Iterator[tuple[Row, Counted]]:
    return ((row, count(row.config)) for row in rows if row.why == why)


# What a page is made of


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown, numbers to the right."""
    rows = list(rows)
    texts = [at == 0 or any("`" in row[at] for row in rows) for at in range(len(header))]
    rule = ["---" if text else "---:" for text in texts]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *rows))


def giga(macs: float) -> str:
    return f"{macs / 1e9:.2f}G"


def mega(parameters: float) -> str:
    return f"{parameters / 1e6:.2f}M"
