"""Measure the time and memory of the local attention backends and of baselines."""

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from vil.bench.attention import Row, measure, plain
from vil.bench.baselines import BESIDE
from vil.ops import BACKENDS, Case, Layout, Window
from vil.ops.patterns import parse_pattern
from vil.ops.tuning import tuning_cache
from vil.report.attention_plots import draw
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.lookup import lookup
from vil.utils.output_paths import make_folder
from vil.workflows.benchmark_results import ResultFolder

WHAT = "attention"
DTYPES = ("float32", "bfloat16", "float16", "float64")
MASKS = {"exact": 1, "chunks": 0, "cyclic": -1}


class AttentionBenchmark:
    """Benchmark of attention backends on every combination of the settings."""

    @as_config_error
    def __init__(
        self,
        *,
        grids: Sequence[tuple[int, int]],
        window: Sequence[int],
        heads: Sequence[int],
        masks: Sequence[str] = (),
        modes: Sequence[int] = (),
        patterns: Sequence[str] = (),
        dtype: Sequence[str],
        rounds: int,
        bias: bool,
        device: str,
        backends: Sequence[str] | None = None,
        max_bytes: float | None = None,
        out: str | None = None,
        **spec: int,
    ):
        """Make a case of each combination of grids, window, heads, dtype, and masks and modes or
        patterns.

        grids: (rows, columns) of tokens. window: sides of a chunk. patterns: patterns to measure
        instead of windows, see `vil.ops.patterns`. bias: with position biases.
        spec: batch, head_dim and num_global of every case. Raises ConfigError for invalid settings.
        """
        self.rounds, self.max_bytes = rounds, max_bytes
        self.device = find_device(device)
        spec |= dict(table_bias=bias, global_bias=bias and spec["num_global"] > 0)
        types = {name: getattr(torch, name) for name in DTYPES}
        windows = [partial(Layout, pattern=parse_pattern(text)) for text in patterns] or [
            partial(Window.from_mode, mask=lookup(MASKS, mask, "mask"), mode=mode)
            for mask, mode in itertools.product(masks, modes)
        ]
        dtypes = [lookup(types, name, "dtype") for name in dtype]
        self.cases = [
            Case(make(grid, size), heads=num_heads, dtype=dtype, device=self.device.type, **spec)
            for dtype, make, size, num_heads, grid in itertools.product(
                dtypes, windows, window, heads, grids
            )
        ]
        known = dict.fromkeys([*BACKENDS, *BESIDE])
        self.names = list(known if backends is None else backends)
        for name in self.names:
            lookup(known, name, "backend")
        tuning_cache.load(self.device.type)
        self.results = ResultFolder(out, WHAT, self.device)
        self.rows: list[dict] = []

    @property
    def title(self) -> str:
        """Heading with the machine, the numbers of cases and rounds, and the folder."""
        return self.results.title(f"{len(self.cases)} cases", self.rounds)

    def run(self) -> Iterator[list[Row]]:
        """Measure the cases in turn. After each one, write all rows so far and yield its rows."""
        for case in self.cases:
            rows = measure(case, self.names, self.rounds, self.max_bytes)
            self.rows += plain(rows)
            self.results.write(self.rows)
            yield rows

    def draw(self) -> list[Path]:
        """Plot time and memory against the grid size; return the files."""
        return draw(self.rows, self.results.machine, self.results.folder)


def draw_again(result: str, out: str | None) -> list[Path]:
    """Draw the plots of an earlier benchmark's JSON file. Returns the files written."""
    file = Path(result)
    try:
        found = json.loads(file.read_text())
        rows, about = found["rows"], found["machine"]
    except OSError as error:
        raise ConfigError(f"--plot {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--plot {file}: not a result of vil benchmark attention") from error
    return draw(rows, about, make_folder(out or file.parent, "--out"))


def find_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda". Raises ValueError if it is not available."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {name!r}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: there is no CUDA device (choices: auto, cpu)")
    return torch.device("cuda" if there and name != "cpu" else "cpu")
