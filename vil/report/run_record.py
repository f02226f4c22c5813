"""Read the data that a run logged in its folder. The files may be incomplete or corrupt."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vil.utils.atomic_write import TEXT
from vil.utils.errors import RunFolderError, os_error_as
from vil.utils.json_text import read_dict

ENTRY = re.compile(r"^# (\d{4}-\d\d-\d\dT\S+)$", re.MULTILINE)  # a start, in command.txt, env.txt
LONGEST = 20_000  # characters kept of a start's text
LARGEST = 3.4e38  # logged number, about the maximum of float32


@dataclass(frozen=True)
class RunRecord:
    """Data that a run logged in its folder.

    status: content of status.json; {} if the file is missing or corrupt.
    commands: content of command.txt, as (time, text) for each start or resume of the run.
    environments: content of env.txt, in the same form.
    points: the lines of metrics.jsonl, see `metrics`.
    """

    folder: Path
    status: dict
    commands: list[tuple[str, str]]
    environments: list[tuple[str, str]]
    points: list[dict]

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Read the files that a run logged in its folder.

        Raises RunFolderError if one of them cannot be read.
        """
        with os_error_as(RunFolderError, str(folder)):
            return cls(
                folder,
                read_dict(folder / "status.json"),
                _read_entries(folder / "command.txt"),
                _read_entries(folder / "env.txt"),
                list(metrics(folder / "metrics.jsonl")),
            )

    def training_seconds(self) -> float:
        """Return the total time of all training steps in seconds, including the wait for data."""
        total, before = 0.0, 0
        for point in self.points:
            if point["split"] == "train":
                total += point.get("time", 0.0) * max(point["step"] - before, 0)
                before = point["step"]
        return total

    def evaluations(self, split: str = "val") -> dict[str, list[dict]]:
        """Return {name of a dataset: logged evaluations on this dataset, in the order of the log}.

        split: "val" for the evaluations during training, "test" for the final test.
        """
        sets: dict[str, list[dict]] = {}
        for point in self.points:
            if point["split"].startswith(f"{split}/"):
                sets.setdefault(point["split"].removeprefix(f"{split}/"), []).append(point)
        return sets


def metrics(file: Path) -> Iterator[dict]:
    """Yield each line of a metrics.jsonl as a dict {name: number}, in which only "split" is text.

    NaN, Inf and numbers whose absolute value exceeds LARGEST are omitted. Incomplete lines are
    skipped, such as the last line of a run that is still writing. Yields nothing if there is no
    file.
    """
    if not file.is_file():
        return
    with file.open(**TEXT) as lines:
        for line in lines:
            try:
                point = json.loads(line)
                split = point["split"]
                values = {k: float(v) for k, v in point.items() if type(v) in (int, float)}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                continue
            values = {k: v for k, v in values.items() if abs(v) <= LARGEST}
            if isinstance(split, str) and {"step", "epoch"} <= values.keys():
                yield {**values, "split": split}


def _read_entries(file: Path) -> list[tuple[str, str]]:
    """Read a file in which each text follows a line "# TIME". Returns a list of (time, text), or []
    if the file does not exist. Texts are truncated to LONGEST characters."""
    if not file.is_file():
        return []
    _, *parts = ENTRY.split(file.read_text(**TEXT))
    return [(time, text.strip()[:LONGEST]) for time, text in zip(parts[::2], parts[1::2])]
