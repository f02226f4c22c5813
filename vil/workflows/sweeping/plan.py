"""Plan the runs of a sweep, and record them in the sweep's folder.

    <sweep>/sweep.json            the runs, in order: name, group, variant, values of swept keys
            base.yaml             the config that all runs share
            configs/<run>.yaml    the complete config of a run
            runs/<run>/           the folder of a run, as `vil train` writes it
            output/<run>.txt      what the run printed
            output/<run>.json     how the last attempt to train the run ended

Runs are identified by their configs, so a repeated or larger grid trains no run twice.
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
from vil.workflows.log_forwarding import log_warnings_once
from vil.workflows.sweeping.grid import Cell, Grid, digest, plain

# Keys that a later call may change, unless the sweep varies them: where and how a run is computed,
# not what.
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
    """Run of a sweep.

    sweep: the sweep's folder.
    group: name of the group of runs that differ only in their seed.
    variant: name of the variant, or "".
    settings: {config key that the sweep varies: the run's value, as the user wrote it}.
    cfg: the complete config.
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
    """All runs of a sweep.

    folder: the sweep's folder. base: the config that the runs share. runs: the runs, in order.
    """

    folder: Path
    base: CfgNode
    runs: Sequence[SweepRun]

    @property
    def keys(self) -> list[str]:
        """The config keys whose values the sweep varies, in order."""
        return list(dict.fromkeys(key for run in self.runs for key in run.settings))

    @property
    def groups(self) -> dict[str, list[SweepRun]]:
        """Groups of runs that differ only in their seed, as {name of the group: its runs}, in the
        order of `runs`."""
        groups: dict[str, list[SweepRun]] = {}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        return groups


def plan_sweep(grid: Grid, folder: str | Path) -> SweepPlan:
    """Plan the runs of a grid, in addition to the runs that the sweep's folder records already.

    No files are written. A grid without a base config uses that of the folder. Raises ConfigError
    if a run's config is invalid, or if the grid contradicts the recorded runs.
    """
    with log_warnings_once():
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
                f"{folder} has no sweep yet, and there is nothing to sweep over: give "
                '"KEY=[a, b]" or --grid FILE'
            )
        return SweepPlan(folder, base, merge([], planned, []))
    check_base(known, base, planned, grid)
    settings = [Setting(key, value, "flag") for key, value in grid.flags.items()]
    local = [s for s in (*grid.fixed, *settings) if s.key in LOCAL]
    return replace(known, runs=merge(known.runs, planned, local))


def plan_cell(grid: Grid, cell: Cell, folder: Path) -> SweepRun:
    """Plan the run of one cell of a grid. A cell is a combination of settings. folder: the sweep's
    folder. Raises ConfigError if the config of the run is invalid."""
    name = grid.name(cell)
    try:
        cfg = grid.resolve(cell)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from error
    return SweepRun(
        sweep=folder,
        name=name,
        group=grid.name(cell, without=[SEED]) or "all",
        variant=cell.variant.name if cell.variant else "",
        settings=cell.settings,
        cfg=cfg,
    )


def check_base(known: SweepPlan, base: CfgNode, planned: Sequence[SweepRun], grid: Grid) -> None:
    """Raise ConfigError if the base config of a grid differs from the one in the sweep's folder.

    Keys that the sweep varies, and LOCAL keys, may differ. known: the plan in the folder. base: the
    grid's base config. planned: the grid's runs.
    """
    own = {*LOCAL, *known.keys, *(key for run in planned for key in run.settings)}
    own |= {setting.key for variant in grid.variants for setting in variant.settings}
    for key, (was, now) in diff(known.base, base).items():
        if key not in own:
            raise ConfigError(
                f"{key} is {was!r} in the sweep in {known.folder}, and cannot be changed to "
                f"{now!r}: choose another --output, or sweep over the values with {key}=[...]"
            )


def merge(
    known: Sequence[SweepRun], planned: Sequence[SweepRun], local: Sequence[Setting]
) -> list[SweepRun]:
    """Return the known runs of a sweep, followed by the planned runs that are new.

    A planned run is new if no known run and no earlier planned run has the same config. local:
    settings of LOCAL keys, to apply to the known runs. Keys that the sweep varies are not changed.
    """
    runs = {}
    for run in known:
        changes = [setting for setting in local if setting.key not in run.settings]
        runs[run.name] = replace(run, cfg=override(run.cfg, changes))
    by_config = {identify(run): run.name for run in known}
    groups = {identify(run, SEED): run.group for run in known}
    seen: dict[str, str] = {}
    for run in planned:
        name = by_config.get(identify(run))
        if name in seen:
            log.warning(
                "%s and %s have the same config: only one of them is trained", seen[name], run.name
            )
            continue
        if name is None:
            run = with_free_name(run, runs)
            name = by_config[identify(run)] = run.name
            runs[name] = replace(run, group=groups.setdefault(identify(run, SEED), run.group))
        runs[name] = replace(runs[name], cfg=run.cfg)
        seen[name] = run.name
    return list(runs.values())


def with_free_name(run: SweepRun, taken: Mapping[str, SweepRun]) -> SweepRun:
    """Return the run, renamed if another run has the same name.

    taken: {name: run} for the other runs. Raises ConfigError if the other run also has the same
    variant, and the same values of the keys that the sweep varies.
    """
    other = taken.get(run.name)
    if other is None:
        return run
    if (other.variant, other.settings) == (run.variant, run.settings):
        ignored = LOCAL.difference(run.settings)
        changed = {k: v for k, v in diff(other.cfg, run.cfg).items() if k not in ignored}
        key, (was, now) = next(iter(changed.items()))
        raise ConfigError(
            f"the sweep in {run.sweep} already has a run {run.name} with {key} {was!r}, but the "
            f"new run {run.name} has {key} {now!r}: choose another --output, or rename the variant"
        )
    mark = digest(plain([run.variant, *map(plain, run.settings.values())]))
    return replace(run, name=f"{run.name}-{mark}", group=f"{run.group}-{mark}")


def identify(run: SweepRun, *without: str) -> str:
    """Return a text that is equal for runs with the same config.

    LOCAL keys (paths, logging, checkpoints) are ignored, except those that the sweep varies.
    without: more keys to ignore.
    """
    ignored = LOCAL.difference(run.settings).union(without)
    return repr(sorted(item for item in leaves(run.cfg).items() if item[0] not in ignored))


# The folder


def read_plan(folder: Path) -> SweepPlan | None:
    """Read the runs that a sweep's folder records. Returns None if the folder has no sweep.

    Raises ConfigError if the folder is that of a single run, or if its sweep.json is invalid.
    """
    file = folder / "sweep.json"
    if (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is the folder of a run, not of a sweep: choose another --output"
        )
    if not file.is_file():
        return None
    try:
        rows = json.loads(file.read_text(**TEXT))["runs"]
        found = [
            SweepRun(sweep=folder, **{key: row[key] for key in FIELDS}, cfg=CfgNode())
            for row in rows
        ]
        valid = all(NAME.fullmatch(run.name) and isinstance(run.settings, dict) for run in found)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if not valid:
        raise ConfigError(
            f"{file} is not valid: each run needs settings, and a name of letters, digits and the "
            "characters _ . + -"
        )
    runs = [replace(run, cfg=get_config(run.config_file)) for run in found]
    return SweepPlan(folder, get_config(folder / "base.yaml"), runs)


def write_plan(plan: SweepPlan) -> None:
    """Write a sweep's runs and configs to its folder. sweep.json is written last, so that each run
    in it has a config file. Raises ConfigError if the folder cannot be written."""
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
    """Write a text file, unless the file already has this content."""
    if not file.is_file() or file.read_text(**TEXT) != text:
        replace_text(file, text)
