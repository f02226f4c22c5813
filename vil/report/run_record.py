"""What stands in a run's folder, read with patience: it may be running, cut short or damaged."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vil.utils.atomic_write import TEXT

ENTRY = re.compile(r"^# (\d{4}-\d\d-\d\dT\S+)$", re.MULTILINE)  # a start, in command.txt, env.txt
LONGEST = 20_000  # signs of a start's text that are kept


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it.

    status: that of status.json, empty without one. commands, environments: (time, text) of each
    start. points: the lines of metrics.jsonl.
    """

    folder: Path
    status: dict
    commands: list[tuple[str, str]]
    environments: list[tuple[str, str]]
    points: list[dict]

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        return cls(
            folder,
            status_of(folder / "status.json"),
            entries(folder / "command.txt"),
            entries(folder / "env.txt"),
            list(metrics(folder / "metrics.jsonl")),
        )

    def training_seconds(self) -> float:
        """Seconds that the steps took, waiting for data included, evaluation not."""
        total, before = 0.0, 0
        for point in self.points:
            if point["split"] == "train":
                total += point.get("time", 0.0) * max(point["step"] - before, 0)
                before = point["step"]
        return total

    def evaluations(self) -> dict[str, list[dict]]:
        """{test set: its points}, in the order of the steps."""
        found: dict[str, list[dict]] = {}
        for point in self.points:
            if point["split"].startswith("val/"):
                found.setdefault(point["split"].removeprefix("val/"), []).append(point)
        return found


def metrics(file: Path) -> Iterator[dict]:
    """The lines of metrics.jsonl, with their finite numbers only. One that is not whole (still
    being written, cut by a crash) is passed over; without a file there are none.
    """
    if not file.is_file():
        return
    with file.open(**TEXT) as lines:
        for line in lines:
            try:
                point = json.loads(line)
                split = point["split"]
                found = {k: float(v) for k, v in point.items() if type(v) in (int, float)}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                continue
            found = {k: v for k, v in found.items() if math.isfinite(v)}
            if isinstance(split, str) and {"step", "epoch"} <= found.keys():
                yield {**found, "split": split}


def status_of(file: Path) -> dict:
    """The object in status.json; empty where there is none."""
    try:
        found = json.loads(file.read_text(**TEXT))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def entries(file: Path) -> list[tuple[str, str]]:
    """(time, text) of each dated entry."""
    if not file.is_file():
        return []
    _, *parts = ENTRY.split(file.read_text(**TEXT))
    return [(when, what.strip()[:LONGEST]) for when, what in zip(parts[::2], parts[1::2])]
