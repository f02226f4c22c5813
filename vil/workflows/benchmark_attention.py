"""Time and memory of local attention, every backend in one run."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vil.bench.attention import Row, measure, plain
from vil.bench.baselines import BESIDE
from vil.ops import BACKENDS, Case, Window
from vil.ops.tuning import tuning_cache
from vil.report.attention_plots import draw
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.lookup import lookup
from vil.utils.machine import machine
from vil.workflows.benchmark_results import number, result_folder, split, write_results

WHAT = "attention"
DTYPES = ("float32", "bfloat16", "float16", "float64")
MASKS = {"exact": 1, "chunks": 0, "cyclic": -1}


@dataclass(frozen=True)
class Settings:
    """What to measure, as on the command line: lists are joined by commas."""

    grids: str
    window: str
    heads: str
    masks: str
    modes: str
    dtype: str
    batch: str
    head_dim: str
    num_global: str
    bias: bool
    backends: str | None
    rounds: str
    device: str
    max_bytes: str | None
    out: str | None


class AttentionBenchmark:
    """The product of all settings. Raises ConfigError for values that are not allowed."""

    @as_config_error
    def __init__(self, s: Settings):
        self.rounds, self.limit = number(s.rounds, "--rounds"), parse_bytes(s.max_bytes)
        self.device = find_device(s.device)
        num_global = number(s.num_global, "--num-global", least=0)
        spec = dict(
            batch=number(s.batch, "--batch"),
            head_dim=number(s.head_dim, "--head-dim"),
            num_global=num_global,
            device=self.device.type,
            table_bias=s.bias,
            global_bias=s.bias and num_global > 0,
        )
        types = {name: getattr(torch, name) for name in DTYPES}
        product = itertools.product(
            [lookup(types, name, "dtype") for name in split(s.dtype, "--dtype")],
            [lookup(MASKS, name, "mask") for name in split(s.masks, "--masks")],
            [number(text, "--modes", least=-1) for text in split(s.modes, "--modes")],
            [number(text, "--window") for text in split(s.window, "--window")],
            [number(text, "--heads") for text in split(s.heads, "--heads")],
            [parse_grid(text) for text in split(s.grids, "--grids")],
        )
        self.cases = [
            Case(window=Window.from_mode(grid, size, mask, mode), heads=heads, dtype=dtype, **spec)
            for dtype, mask, mode, size, heads, grid in product
        ]
        self.names = find_candidates(s.backends)
        tuning_cache.load(self.device.type)
        self.machine = machine(self.device)
        self.folder = result_folder(s.out, self.machine, WHAT)
        self.rows: list[dict] = []

    @property
    def title(self) -> str:
        """The machine, and how much is measured."""
        about = self.machine
        return (
            f"{about['name']}, {about['threads']} threads, torch {about['torch']}; "
            f"{len(self.cases)} cases, {self.rounds} rounds -> {self.folder}"
        )

    def run(self) -> Iterator[list[Row]]:
        """Measure case by case; yield the rows of each once they are on the disk."""
        for case in self.cases:
            rows = measure(case, self.names, self.rounds, self.limit)
            self.rows += plain(rows)
            write_results(self.folder, WHAT, self.rows, self.machine)
            yield rows

    def draw(self) -> list[Path]:
        """Draw time and memory against the size of the grid; return the files."""
        return draw(self.rows, self.machine, self.folder)


def draw_again(result: str, out: str | None) -> list[Path]:
    """Draw the plots of a result that was written before."""
    file = Path(result)
    try:
        found = json.loads(file.read_text())
        rows, about = found["rows"], found["machine"]
    except OSError as error:
        raise ConfigError(f"--plot {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--plot {file}: not a result of vil benchmark attention") from error
    return draw(rows, about, result_folder(out or str(file.parent), about, WHAT))


def find_candidates(backends: str | None) -> list[str]:
    """The candidates requested, or all."""
    known = [*BACKENDS, *BESIDE]
    names = known if backends is None else split(backends, "--backends")
    for name in names:
        lookup(dict.fromkeys(known), name, "backend")
    return names


def find_device(name: str) -> torch.device:
    """The torch device. Raises ValueError for one that is not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {name!r}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: there is no CUDA device (choices: auto, cpu)")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def parse_grid(text: str) -> tuple[int, int]:
    """'14' -> (14, 14), '14x20' -> (14, 20)."""
    sides = [number(side, "--grids") for side in text.lower().split("x")]
    if len(sides) > 2:
        raise ValueError(f"--grids: expected a side or rows x columns, got {text!r}")
    return sides[0], sides[-1]


def parse_bytes(text: str | None) -> float | None:
    """A positive number of bytes, or None."""
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise ValueError(f"--max-bytes: expected a number above 0, got {text!r}")
    return found
