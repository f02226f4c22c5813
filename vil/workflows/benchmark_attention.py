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
from vil.report.benchmark_plots import draw
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.lookup import lookup
from vil.utils.output_paths import make_folder
from vil.workflows.benchmark_results import ResultFolder

WHAT = "attention"
DTYPES = ("float32", "bfloat16", "float16", "float64")
MASKS = {"exact": 1, "chunks": 0, "cyclic": -1}


class AttentionBenchmark:
    """Benchmark of local attention backends and baselines, such as full attention.

    Measures all combinations of grid sizes, chunk sizes, numbers of heads, dtypes, and local
    windows or attention patterns. A local window is given by a mask ("exact", "chunks" or "cyclic")
    and a value of the config key MODE.
    """

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
        """Prepare a measurement for each combination of the values in the lists.

        grids: grid sizes, as (rows, columns) of tokens.
        window: chunk sizes, as the side of a square chunk in tokens.
        masks: shapes of the local window, "exact", "chunks" or "cyclic".
        modes: values of the config key MODE, which selects the neighbor chunks in the window.
        patterns: attention patterns to measure instead of `masks` and `modes`, such as "axial".
        dtype: names of dtypes, such as "bfloat16".
        rounds: number of measurements of each backend.
        bias: whether to add relative position biases.
        device: "auto", "cpu" or "cuda".
        backends: names of the backends and baselines to measure, by default all.
        max_bytes: memory limit, by default 0.8 of the free memory. A backend that is estimated to
        need more does not run.
        out: folder for the results.
        spec: `batch` (batch size), `head_dim` and `num_global` (number of global tokens).

        Raises ConfigError for invalid settings.
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
        """Heading of the printed results: the machine, the number of combinations of settings, the
        number of measurements per backend, and the folder of the results."""
        return self.results.title(f"{len(self.cases)} cases", self.rounds)

    def run(self) -> Iterator[list[Row]]:
        """Measure each combination of settings, and yield its results: a row per backend.

        After each combination, the rows of all combinations so far are written to the result files.
        """
        for case in self.cases:
            rows = measure(case, self.names, self.rounds, self.max_bytes)
            self.rows += plain(rows)
            self.results.write(self.rows)
            yield rows

    def draw(self) -> list[Path]:
        """Plot time and memory against the grid size. Returns the plot files."""
        return draw(self.rows, self.results.machine, self.results.folder)


def draw_again(result: str, out: str | None) -> list[Path]:
    """Draw the plots of an earlier benchmark from its JSON file `result`. Returns the plot files.

    out: folder for the plots, by default the folder of `result`.
    """
    file = Path(result)
    try:
        found = json.loads(file.read_text())
        rows, about = found["rows"], found["machine"]
    except OSError as error:
        raise ConfigError(f"--plot {file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--plot {file} is not a result of vil benchmark attention: "
            "use the attention.json of an earlier run"
        ) from error
    return draw(rows, about, make_folder(out or file.parent, "--out"))


def find_device(name: str) -> torch.device:
    """Return the device for a name. "auto" is the CUDA device if there is one, otherwise the CPU.

    name: "auto", "cpu" or "cuda". Raises ValueError for any other name, and for "cuda" if there is
    no CUDA device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {name!r}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: there is no CUDA device (choices: auto, cpu)")
    return torch.device("cuda" if there and name != "cpu" else "cpu")
