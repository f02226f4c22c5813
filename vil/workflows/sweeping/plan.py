"""The runs of a sweep and the folder that remembers them.

    <sweep>/sweep.json            the runs, in order: name, variant, and value of each axis
            base.yaml             the config that all runs share
            configs/<run>.yaml    the complete config of each run
            runs/<run>/           its folder, as `vil train` writes it
            output/<run>.txt      what it printed
            output/<run>.json     how its last attempt ended

A run is identified by its config, so a grid that is given again, or extended, repeats no run.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.config import diff, dump, get_config, override
from vil.config.defaults import leaves
from vil.config.yaml_source import Setting
from vil.utils.atomic_write import TEXT, replace_text
from vil.utils.errors import ConfigError, os_error_as
from vil.utils.output_paths import make_folder
from vil.workflows.log_forwarding import distinct_warnings
from vil.workflows.sweeping.grid import Cell, Grid, digest, plain

# Keys that a later call may change: where and how a run is computed, not what.
LOCAL = {
    "OUTPUT_DIR", "IMPORTS", "DATA.PATH", "DATALOADER.WORKERS", "LOG_FREQ", "RUN.SAVE_EVERY",
    "RUN.SAVE_STEPS", "RUN.KEEP", "RUN.KEEP_EVERY", "RUN.MAX_FAILED_SAVES", "RUN.HANG_SECONDS",
    "RUN.GRACE_SECONDS",
}  # fmt: skip
SEED = "SEED"
FIELDS = ("name", "group", "variant", "settings")  # of a run, in sweep.json
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep.

    name: of its folder. group: the name without the seed, which runs share that differ by their
    seed only. settings: {key: value as written} of the axes. cfg: the complete config.
    """

    sweep: Path
    name: str
    group: str
    variant: str
    settings: Mapping[str, Any]
    cfg: CfgNode

    @property
    def folder(self) -> Path:
        return self.sweep / "runs" / self.name

    @property
    def config_file(self) -> Path:
        return self.sweep / "configs" / f"{self.name}.yaml"

    @property
    def output_file(self) -> Path:
        return self.sweep / "output" / f"{self.name}.txt"

    @property
    def outcome_file(self) -> Path:
        return self.sweep / "output" / f"{self.name}.json"


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep. base: the config that they share. keys: the axes, in order."""

    folder: Path
    base: CfgNode
    runs: Sequence[SweepRun]

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for run in self.runs for key in run.settings))

    @property
    def groups(self) -> dict[str, list[SweepRun]]:
        """{group: its runs}, in the order of the first run of each."""
        groups: dict[str, list[SweepRun]] = {}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        return groups


def plan_sweep(grid: Grid, folder: str | Path) -> SweepPlan:
    """Return the runs of a folder and of a grid together. Writes nothing.

    Without a base of its own, the grid has that of the folder. Raises ConfigError for a config that
    is not valid, and for a grid that contradicts the runs of the folder.
    """
    with distinct_warnings():
        return _plan(grid, Path(folder))


def _plan(grid: Grid, folder: Path) -> SweepPlan:
    known = read_plan(folder)
    if known and grid.config is None:
        grid = replace(grid, config=known.base)
    base = grid.base()
    planned = [plan_cell(grid, cell, folder) for cell in grid.cells()]
    if known is None:
        if not planned:
            raise ConfigError(
                f"{folder} holds no sweep yet, and there is nothing to sweep over: give "
                '"KEY=[a, b]" or a file with --grid'
            )
        return SweepPlan(folder, base, merge([], planned, []))
    check_base(known, base, planned, grid)
    settings = [Setting(key, value, "flag") for key, value in grid.flags.items()]
    local = [s for s in (*grid.fixed, *settings) if s.key in LOCAL]
    return replace(known, runs=merge(known.runs, planned, local))


def plan_cell(grid: Grid, cell: Cell, folder: Path) -> SweepRun:
    name = grid.name(cell)
    try:
        cfg = grid.resolve(cell)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from error
    variant = cell.variant.name if cell.variant else ""
    group = grid.name(cell, without=[SEED]) or "all"
    return SweepRun(folder, name, group, variant, cell.settings, cfg)


def check_base(known: SweepPlan, base: CfgNode, planned: Sequence[SweepRun], grid: Grid) -> None:
    """Raise ConfigError if a base config contradicts that of a folder. Keys that a run sets
    itself may differ."""
    own = {*LOCAL, *known.keys, *(key for run in planned for key in run.settings)}
    own |= {setting.key for variant in grid.variants for setting in variant.settings}
    for key, (was, now) in diff(known.base, base).items():
        if key not in own:
            raise ConfigError(
                f"{known.folder} was started with {key} {was!r}, not {now!r}: choose another "
                f"--output, or give {key} several values"
            )


def merge(
    known: Sequence[SweepRun], planned: Sequence[SweepRun], local: Sequence[Setting]
) -> list[SweepRun]:
    """Add the planned runs to the known ones.

    A planned run with the config of a known one is that run. local: settings of LOCAL keys, which
    known runs adopt.
    """
    runs = {run.name: replace(run, cfg=override(run.cfg, local)) for run in known}
    by_config = {identify(run.cfg): run.name for run in known}
    groups = {identify(run.cfg, SEED): run.group for run in known}
    seen: dict[str, str] = {}
    for run in planned:
        name = by_config.get(identify(run.cfg))
        if name is None:
            run = with_free_name(run, runs)
            name = by_config[identify(run.cfg)] = run.name
            runs[name] = replace(run, group=groups.setdefault(identify(run.cfg, SEED), run.group))
        elif name in seen:
            log.warning("%s has the config of %s: it runs once", run.name, seen[name])
        runs[name] = replace(runs[name], cfg=run.cfg)
        seen.setdefault(name, run.name)
    return list(runs.values())


def with_free_name(run: SweepRun, taken: Mapping[str, SweepRun]) -> SweepRun:
    """Return a run with another name if its name is taken by a run with other values.

    Raises ConfigError if that run has the same values: then what they share differs.
    """
    other = taken.get(run.name)
    if other is None:
        return run
    if (other.variant, other.settings) == (run.variant, run.settings):
        changed = {k: v for k, v in diff(other.cfg, run.cfg).items() if k not in LOCAL}
        key, (was, now) = next(iter(changed.items()))
        raise ConfigError(
            f"{run.sweep}: the run {run.name} has {key} {was!r}, not {now!r}: choose another "
            "--output, or another name of the variant"
        )
    mark = digest(plain([run.variant, *map(plain, run.settings.values())]))
    return replace(run, name=f"{run.name}-{mark}", group=f"{run.group}-{mark}")


def identify(cfg: CfgNode, *without: str) -> str:
    """Return a text that is equal for configs that compute the same. without: keys to ignore."""
    ignored = LOCAL.union(without)
    return repr(sorted(item for item in leaves(cfg).items() if item[0] not in ignored))


# The folder


def read_plan(folder: Path) -> SweepPlan | None:
    """Read the runs that a folder remembers; None if it holds no sweep."""
    file = folder / "sweep.json"
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is the folder of a run: choose another --output")
    if not file.is_file():
        return None
    try:
        rows = json.loads(file.read_text(**TEXT))["runs"]
        found = [SweepRun(folder, *(row[key] for key in FIELDS), cfg=CfgNode()) for row in rows]
        valid = all(NAME.fullmatch(run.name) and dict(run.settings) is not None for run in found)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if not valid:
        raise ConfigError(f"{file} cannot be read: it names a run that no sweep would name so")
    runs = [replace(run, cfg=get_config(run.config_file)) for run in found]
    return SweepPlan(folder, get_config(folder / "base.yaml"), runs)


def write_plan(plan: SweepPlan) -> None:
    """Write the plan into its folder. sweep.json comes last, so that it names no missing config."""
    with os_error_as(ConfigError, f"--output {plan.folder}"):
        for name in ("configs", "runs", "output"):
            make_folder(plan.folder / name, "--output")
        write_changed(plan.folder / "base.yaml", dump(plan.base))
        for run in plan.runs:
            cfg = override(run.cfg, flags={"OUTPUT_DIR": str(run.folder)})
            write_changed(run.config_file, dump(cfg))
        rows = [{field: getattr(run, field) for field in FIELDS} for run in plan.runs]
        text = json.dumps({"version": 1, "runs": rows}, indent=1)
        write_changed(plan.folder / "sweep.json", text + "\n")


def write_changed(file: Path, text: str) -> None:
    """Replace a text file, unless it has that content."""
    if not file.is_file() or file.read_text(**TEXT) != text:
        replace_text(file, text)
