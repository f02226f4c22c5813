"""Train a model for every combination of settings in a grid, and compare the results in a table.

    <sweep>/sweep.json            the names of the runs, in order
            configs/<run>.yaml    the complete config of a run
            runs/<run>/           the folder of a run, as `vil train` writes it
            output/<run>.txt      what the run printed
            summary.csv, summary.md, runs.csv    the results

The folders of the runs are the state of a sweep: a run whose folder does not say that it has
finished is started or resumed, by `vil train --resume`.
"""

import itertools
import json
import logging
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from yacs.config import CfgNode

from vil.config import diff, dump, get_config, override, yaml_source
from vil.config.defaults import KEYS, leaves
from vil.config.yaml_source import EMPTY, Setting
from vil.data import takes_list
from vil.engine.loop import Metric
from vil.engine.preemption import LAUNCHER_PID, set_handlers
from vil.engine.run_dir import is_locked, lock
from vil.report.run_record import RunRecord
from vil.report.sweep_table import (
    REPEATED,
    GroupRow,
    RunRow,
    format_table,
    summarize,
    to_csv,
)
from vil.tasks import task_for, with_num_classes
from vil.utils.atomic_write import TEXT, replace_text
from vil.utils.errors import (
    INTERRUPTED,
    PREEMPTED,
    ConfigError,
    RunFolderError,
    StoppedError,
    os_error_as,
)
from vil.utils.machine import affinity, now, processor
from vil.utils.output_paths import make_folder
from vil.utils.plural import plural
from vil.workflows.analyze import analyze_cost
from vil.workflows.configure import Overrides, as_options, make_config
from vil.workflows.log_forwarding import forward_logs, log_warnings_once

# Keys that say where and how a run is computed, not what: a later call may change them.
LOCAL = {
    "OUTPUT_DIR", "IMPORTS", "DATA.PATH", "DATALOADER.WORKERS", "LOG_FREQ", "RUN.SAVE_EVERY",
    "RUN.SAVE_STEPS", "RUN.KEEP", "RUN.KEEP_EVERY", "RUN.MAX_FAILED_SAVES", "RUN.HANG_SECONDS",
    "RUN.GRACE_SECONDS",
}  # fmt: skip
SPREAD = "± is the standard deviation over the runs that differ only in their seed or fold."
MAX_RUNS = 10_000  # of one grid
LONGEST = 60  # characters of a value in a folder's name
ERROR = re.compile(r"^(?:vil [^\s:]+|torchrun)[^:\n]*: (.+)$", re.MULTILINE)  # of a command
TAIL = 20_000  # bytes of a run's output that are searched for an error
POLL_SECONDS = 0.1

log = logging.getLogger(__name__)
Say = Callable[[str], None]


@dataclass(frozen=True)
class SweepRun:
    """Run of a sweep. sweep: the sweep's folder."""

    sweep: Path
    name: str
    cfg: CfgNode

    @property
    def group(self) -> str:
        """Name of the group of runs that differ only in their seed or fold."""
        own = f"(^|-)(seed_{self.cfg.SEED}|fold_{self.cfg.DATA.FOLD})(?=-|$)"
        return re.sub(own, "", self.name).removeprefix("-") or "all"

    @property
    def folder(self) -> Path:
        return self.path("runs")

    def path(self, part: str, suffix: str = "") -> Path:
        """Return a path in a part of the sweep's folder, such as configs/<run>.yaml."""
        return self.sweep / part / f"{self.name}{suffix}"


class SweepResult(NamedTuple):
    """Result of a sweep.

    status: "finished", "failed" if a run failed, "interrupted" if Ctrl-C stopped the sweep, or
    "unfinished" if runs were stopped otherwise or were not to be trained. code: exit code of the
    command `vil sweep`. rows: a table row for each group of runs that differ only in their seed or
    fold. runs: a table row for each run. text: the table. plan: the runs with their configs.
    metric: its name.
    """

    status: str
    code: int
    folder: Path
    rows: list[GroupRow]
    runs: list[RunRow]
    text: str
    plan: list[SweepRun]
    metric: str


def sweep(
    config: CfgNode | str | Path | None = None,
    overrides: Overrides | None = None,
    *,
    output_dir: str | Path,
    grid: Mapping[str, Sequence[Any]] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    file: str | Path | None = None,
    data: str | Path | None = None,
    imports: Sequence[str] = (),
    jobs: int = 1,
    num_processes: int = 1,
    train: bool = True,
    say: Say = log.info,
) -> SweepResult:
    """Train a model for each combination of a variant and grid values, in separate processes of
    `vil train`.

    config, overrides, data, imports: the config that all runs share, as in `vil.train`. In
    `overrides`, a list of values makes its key an axis of the grid.
    output_dir: folder of the sweep. If no grid is given, its recorded runs are trained.
    grid: {config key: values to try}.
    variants: named sets of settings that change together, as {name: {key: value}}; the key _BASE_
    is a config file that replaces `config`.
    file: a grid file, see docs/guides/sweep.md. The other arguments replace its settings.
    jobs: number of runs to train at a time.
    num_processes: number of processes of each run.
    train: False to only check all configs and read the results so far. No files are written.
    say: called with a line of text when a run begins or ends.

    Finished runs in `output_dir` are not repeated, and other runs resume. A run that fails does not
    end the sweep. On Ctrl-C, the runs save their state and the status is "interrupted". On SIGTERM,
    SIGUSR1 and SIGHUP, StoppedError is raised. If the config of any run is invalid or contradicts a
    recorded run, ConfigError is raised before the first run starts.
    """
    folder, settings = Path(output_dir), read_grid(file) if file else Grid()
    settings.base = settings.base if config is None else config
    with forward_logs(False):  # the configs of the runs repeat the warnings
        make_config(settings.base, imports=imports)  # the imports may declare keys
    for setting in yaml_source.from_options(as_options(overrides)):
        settings.add("grid" if is_axis(setting) else "fixed", setting)
    lists = {key: list(values) for key, values in (grid or {}).items()}
    for setting in yaml_source.from_mapping(lists, "grid"):
        settings.add("grid", setting)
    if data is not None:
        settings.add("fixed", Setting("DATA.PATH", str(data), "--data"))
    for name, changes in (variants or {}).items():
        settings.variants[name] = list(yaml_source.from_mapping(changes, "variant"))
    with log_warnings_once():
        plan = plan_runs(folder, settings, imports)
    metric, sizes = check_models(plan)
    if not train:
        return read_results(plan, metric, sizes, {run.name: PREEMPTED for run in plan})
    make_folder(folder, "--output")
    with lock(folder / "sweep.lock"):
        write_plan(plan)
        number, returncodes = train_runs(plan, metric, jobs, num_processes, say)
        result = read_results(plan, metric, sizes, returncodes)
        write_table(result)
    if not number:
        return result
    stop = StoppedError(signal.Signals(number))
    if stop.exit_code != INTERRUPTED:
        raise stop
    return result._replace(status="interrupted", code=INTERRUPTED)


# The runs


@dataclass
class Grid:
    """Settings of a sweep. base: the config that the runs share. fixed: settings of all runs, by
    key. axes: {key: its settings to try}. variants: {name: settings that change together}."""

    base: CfgNode | str | Path | None = None
    fixed: dict[str, Setting] = field(default_factory=dict)
    axes: dict[str, list[Setting]] = field(default_factory=dict)
    variants: dict[str, list[Setting]] = field(default_factory=dict)

    def add(self, part: str, setting: Setting) -> None:
        """Add a setting to "fixed", or as an axis to "grid". It replaces earlier ones of its key.
        Raises ConfigError if the key is not allowed, or if an axis has no values."""
        key, value, where = setting
        if key == "OUTPUT_DIR":
            raise ConfigError(f"{where}: {key} is not allowed, because --output sets the folders")
        if part == "grid" and not (isinstance(value, list) and value):
            raise ConfigError(f"{where}: {key}: expected a list of values, got {value!r:.80}")
        self.fixed.pop(key, None)
        self.axes.pop(key, None)
        if part == "grid":
            self.axes[key] = [Setting(key, each, where) for each in value]
        else:
            self.fixed[key] = setting


def read_grid(file: str | Path) -> Grid:
    """Read a grid file, which docs/guides/sweep.md describes. Raises ConfigError if the file, or a
    config file that it names, is missing or invalid."""
    path, grid = yaml_source.find(file), Grid()
    text, is_variant = yaml_source.read_text(path), re.compile(r"variants\.[^.]+").fullmatch
    for full_key, value, where in yaml_source.read_yaml(text, yaml_source.shown(path), is_variant):
        part, _, key = full_key.partition(".")
        name, _, variant_key = key.partition(".")
        if full_key == "base" or variant_key == "_BASE_":
            roots = yaml_source.base_roots(path)
            value = str(yaml_source.find_base(str(value), path, where, roots))
        if full_key == "base":
            grid.base = value
        elif part in ("fixed", "grid") and key:
            grid.add(part, Setting(key, value, where))
        elif part == "variants" and variant_key:
            grid.variants.setdefault(name, []).append(Setting(variant_key, value, where))
        elif part == "variants" and key and value in ("", EMPTY):
            grid.variants[name] = []
        elif value != "" or part not in ("fixed", "grid", "variants"):
            raise ConfigError(
                f"{where}: {full_key}: expected `base: FILE`, or config keys with their values in "
                "`fixed`, `grid` or a variant in `variants`"
            )
    return grid


def is_axis(setting: Setting) -> bool:
    """Return whether a setting has a list of values to sweep over, rather than a single value. If
    one value of the key is itself a list, the list to sweep over must contain a list."""
    if not isinstance(setting.value, list):
        return False
    section, _, name = setting.key.rpartition(".")
    if section == "DATA.KWARGS":
        is_list_key = takes_list(name)
    else:
        is_list_key = setting.key in KEYS and isinstance(KEYS[setting.key].default, list | tuple)
    return not is_list_key or any(isinstance(item, list) for item in setting.value)


def plan_runs(folder: Path, grid: Grid, imports: Sequence[str]) -> list[SweepRun]:
    """List the runs that a sweep's folder records, then those of the grid. If the grid has neither
    axes nor variants, its settings apply to the recorded runs. Raises ConfigError if the config of
    a run is invalid, or contradicts a recorded run."""
    known = read_plan(folder)
    if grid.axes or grid.variants:
        planned = expand(folder, grid, imports)
    elif known and grid.base is None:
        fixed = list(grid.fixed.values())
        planned = [replace(run, cfg=override(run.cfg, fixed)) for run in known]
    else:
        raise ConfigError(
            f"{folder} has {plural(len(known), 'run') if known else 'no runs yet'}, and there is "
            'nothing to sweep over: give "KEY=[a, b]" or --grid FILE'
        )
    shared = _find_shared(known, grid.fixed)
    for run, other in itertools.product(planned, known):
        changed = diff(other.cfg, run.cfg)
        if run.group != other.group:  # it may differ in what the groups differ in
            changed = {key: values for key, values in changed.items() if key in shared}
        for key, (was, wanted) in changed.items():
            if key not in LOCAL and (key not in REPEATED or run.name == other.name):
                raise ConfigError(
                    f"{key} is {was!r} in the sweep in {folder}, and cannot be changed to "
                    f"{wanted!r}: choose another --output, or sweep over the values with "
                    f"{key}=[...]"
                )
    return list({run.name: run for run in (*known, *planned)}.values())


def _find_shared(runs: Sequence[SweepRun], keys: Collection[str]) -> set[str]:
    """Return those of `keys` that have one value in all runs."""
    values = [leaves(run.cfg) for run in runs]
    return {key for key in keys if len({repr(each[key]) for each in values}) == 1}


def expand(folder: Path, grid: Grid, imports: Sequence[str]) -> list[SweepRun]:
    """Return the run of each combination of a variant and axis values. The last axis varies
    fastest. Raises ConfigError if a config is invalid, if two runs have the same name, or if there
    are more than MAX_RUNS."""
    runs: dict[str, SweepRun] = {}
    short = {key: key.rpartition(".")[2].lower() for key in grid.axes}
    for key in [key for key in short if [*short.values()].count(short[key]) > 1]:
        short[key] = key.lower()
    choices = (grid.variants or {"": []}).items()
    number = math.prod(map(len, (choices, *grid.axes.values())))
    if number > MAX_RUNS:
        raise ConfigError(
            f"the grid has {number} runs, more than {MAX_RUNS}: give its axes fewer values"
        )
    for (variant, settings), *values in itertools.product(choices, *grid.axes.values()):
        labels = [slug(variant)] if variant else []
        name = "-".join([*labels, *(f"{short[s.key]}_{slug(s.value)}" for s in values)])
        own = {setting.key: setting for setting in settings}
        base = own.pop("_BASE_").value if "_BASE_" in own else grid.base
        words = [*grid.fixed.values(), *own.values(), *values]
        try:
            if name in runs:
                raise ConfigError("given twice; use variants to give runs other names")
            if both := own.keys() & grid.axes.keys():
                raise ConfigError(f"{min(both)} is set by the variant, but is also an axis")
            output = folder / "runs" / name
            cfg = make_config(base, words, output_dir=output, imports=imports)
        except ConfigError as error:
            raise ConfigError(f"run {name}: {error}") from error
        runs[name] = SweepRun(folder, name, cfg)
    return list(runs.values())


def slug(value: Any) -> str:
    """Convert a name or value to a part of a folder's name: characters other than letters, digits,
    ".", "+" and "-" are replaced by "_", and a long text is cut."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", str(value)).strip("._")[:LONGEST] or "none"


def read_plan(folder: Path) -> list[SweepRun]:
    """Read the runs that a sweep's folder records; none if the folder has no sweep. Raises
    ConfigError if the folder is that of a single run, or if its sweep.json is invalid."""
    file = folder / "sweep.json"
    if (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is the folder of a run, not of a sweep: choose another --output"
        )
    try:
        rows = json.loads(file.read_text(**TEXT))["runs"] if file.exists() else []
        runs = [SweepRun(folder, row["name"], CfgNode()) for row in rows]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    return [replace(run, cfg=get_config(run.path("configs", ".yaml"))) for run in runs]


def write_plan(runs: Sequence[SweepRun]) -> None:
    """Write a sweep's runs and configs to its folder. sweep.json is written last, so that each run
    in it has a config file. Raises ConfigError if the folder cannot be written."""
    folder = runs[0].sweep
    for name in ("configs", "runs", "output"):
        make_folder(folder / name, "--output")
    with os_error_as(ConfigError, f"--output {folder}"):
        for run in runs:
            replace_text(run.path("configs", ".yaml"), dump(run.cfg))
        names = [{"name": run.name} for run in runs]
        replace_text(folder / "sweep.json", json.dumps({"runs": names}, indent=1) + "\n")


# Training on this machine


def train_runs(
    runs: Sequence[SweepRun], metric: Metric, jobs: int, num_processes: int, say: Say
) -> tuple[int, dict[str, int]]:
    """Train or resume the unfinished runs of a sweep, `jobs` at a time. Runs that another process
    trains come last, once that process has ended. Signals are forwarded to the runs.

    Returns the number of the signal that stopped the training, or 0, and {name of a run: return
    code of its process}.
    """
    received: list[int] = []
    returncodes: dict[str, int] = {}
    active: dict[int, tuple[SweepRun, subprocess.Popen]] = {}  # by slot
    titles = {run.name: f"[{i}/{len(runs)}] {run.name}" for i, run in enumerate(runs, start=1)}
    waiting = [run for run, row in zip(runs, read_rows(runs, metric)) if row.state != "finished"]
    if len(runs) > len(waiting) > 0:
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs have finished")

    def forward(number: int, frame: object = None) -> None:
        received.append(number)
        for _, process in list(active.values()):
            # SIGUSR1 would kill torchrun; a run handles SIGTERM in the same way
            process.send_signal(signal.SIGTERM if number == signal.SIGUSR1 else number)

    handlers = {}
    if threading.current_thread() is threading.main_thread():  # Python allows it only there
        handlers = set_handlers(forward)
    try:
        while active or (waiting and not received):
            slot = next((slot for slot in range(jobs) if slot not in active), None)
            ready = (run for run in waiting if slot is not None and not is_locked(run.folder))
            if not received and (run := next(ready, None)):
                waiting.remove(run)
                step = read_rows([run], metric)[0].step
                say(f"{titles[run.name]} {f'resumes after step {step}' if step else 'starts'}")
                active[slot] = run, start(run, slot, jobs, num_processes)
                if received:  # while the process was started
                    forward(received[0])
                continue
            time.sleep(POLL_SECONDS)
            for slot, (run, process) in list(active.items()):
                if process.poll() is not None:
                    del active[slot]
                    code = returncodes[run.name] = 0 if received else process.returncode
                    say(f"{titles[run.name]} {describe_end(run, code, metric)}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return (received or [0])[0], returncodes


def start(run: SweepRun, slot: int, jobs: int, num_processes: int) -> subprocess.Popen:
    """Start to train or resume a run, with its share of the cores and GPUs.

    slot: index of the run among those that train at the same time. Without torchrun, the run stops
    if this process is killed.
    """
    own = {}
    if jobs * num_processes > 1:
        given = os.environ.get("OMP_NUM_THREADS", "")
        cores = int(given) if given.isdecimal() else len(affinity())
        own["OMP_NUM_THREADS"] = str(max(1, cores // (jobs * num_processes)))
    if num_processes == 1:  # torchrun's processes watch torchrun
        own[LAUNCHER_PID] = str(os.getpid())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    if devices and jobs > 1:
        first = slot * num_processes
        names = [devices[(first + i) % len(devices)] for i in range(num_processes)]
        own["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(names))
    command = train_command(num_processes)
    command += ["--config-file", str(run.path("configs", ".yaml")), "--output_dir", str(run.folder)]
    with run.path("output", ".txt").open("a", **TEXT) as stream:
        stream.write(f"# {now()} {shlex.join(command)}\n")
        stream.flush()
        streams = dict(stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
        return subprocess.Popen(command, env={**os.environ, **own}, **streams)


def train_command(num_processes: int) -> list[str]:
    """Return the command that trains or resumes a run, without its config and its folder."""
    words = ["-m", "vil", "train", "--resume"]
    if num_processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        words = [*launcher, f"--nproc_per_node={num_processes}", *words]
    return [sys.executable, *words]


def describe_end(run: SweepRun, returncode: int, metric: Metric) -> str:
    """Describe in one line how a run ended: its metric and training time, or why it failed. If a
    signal killed the run, the signal is appended to the run's output first.

    returncode: of the run's process; 0 if a signal has stopped the sweep.
    """
    if returncode < 0:
        name = signal.strsignal(-returncode)
        hint = " (out of memory?)" if -returncode == signal.SIGKILL else ""
        with run.path("output", ".txt").open("a", **TEXT) as stream:
            stream.write(f"vil train: killed by signal {-returncode}, {name}{hint}\n")
    (row,) = read_rows([run], metric)
    if row.state != "finished":
        return f"{row.state}: {row.reason}"
    result = "" if row.metric is None else f"{metric.name} {row.metric:.2f}, "
    return f"finished: {result}{timedelta(seconds=round(row.seconds or 0))} of training"


# The table


def check_models(runs: Sequence[SweepRun]) -> tuple[Metric, dict[str, tuple]]:
    """Check that the model of every group can be built, on the meta device, and that all runs have
    the same metric. Returns the metric, and {name of a group: parameters and multiply-accumulates
    of its model}."""
    first, sizes = None, {}
    for run in runs:
        if run.group in sizes:
            continue
        try:
            task = task_for(with_num_classes(run.cfg), torch.device("cpu"))
            metric = task.metric
            first = first or metric
            if metric.name != first.name:
                raise ConfigError(
                    f"has the metric {metric.name}, but the first run has {first.name}"
                )
            sizes[run.group] = None, None
            if task.supports("cost"):
                cost = analyze_cost(run.cfg)
                sizes[run.group] = cost.parameters, cost.macs
        except ConfigError as error:
            raise ConfigError(f"run {run.name}: {error}") from error
    return first, sizes


def read_results(
    runs: Sequence[SweepRun],
    metric: Metric,
    sizes: Mapping[str, tuple],
    returncodes: Mapping[str, int],
) -> SweepResult:
    """Read the results of a sweep from the folders of its runs.

    metric, sizes: see `check_models`. returncodes: {name of a run: return code of its process, for
    a run that has not recorded its exit code}.
    """
    rows = read_rows(runs, metric)
    groups = [
        summarize([row for row in rows if row.group == group], *size)
        for group, size in sizes.items()
    ]
    text = format_table(groups, rows, metric.label or metric.name, metric.unit)
    unfinished = [row for row in rows if row.state != "finished"]
    codes = [row.code or max(returncodes.get(row.name, 0), 1) for row in unfinished]
    failed = [code for code in codes if code not in (PREEMPTED, INTERRUPTED)]
    status = "failed" if failed else "unfinished" if codes else "finished"
    code = [*failed, *codes, 0][0]
    return SweepResult(status, code, runs[0].sweep, groups, rows, text, runs, metric.name)


def read_rows(runs: Sequence[SweepRun], metric: Metric) -> list[RunRow]:
    """Read the states and the logged results of runs from their folders. The rows have the values
    of the config keys in which the runs differ."""
    rows = []
    changed = {key for run in runs for key in diff(runs[0].cfg, run.cfg)}
    changed -= {*REPEATED, "OUTPUT_DIR"}
    for run in runs:
        output = run.path("output", ".txt")
        try:
            record = RunRecord.read(run.folder)
        except RunFolderError as error:  # the other runs are still in the table
            record = RunRecord(run.folder, {"state": "failed", "reason": str(error)}, [], [], [])
        state, code = record.status.get("state", "pending"), record.status.get("code")
        reason = record.status.get("reason", "")
        if not reason and output.is_file():
            tail = output.read_bytes()[-TAIL:].decode("utf-8", "replace")
            reason = (ERROR.findall(tail) or [""])[-1]
        if state != "finished":
            if is_locked(run.folder):
                state, reason = "running", ""
            elif code in (PREEMPTED, INTERRUPTED) or (state == "running" and not reason):
                state = "interrupted"
            elif reason:  # without a status, the run ended before its first step
                state = "failed"
        results, tests = (
            next(iter(record.evaluations(split).values()), [{}]) for split in ("val", "test")
        )
        known = [point[metric.name] for point in results if metric.name in point]
        steps = [point for point in record.points if point["split"] == "train"]
        speeds = [point["img/s"] for point in steps if "img/s" in point]
        values = leaves(run.cfg)
        rows.append(
            RunRow(
                run.name,
                run.group,
                settings={key: value for key, value in values.items() if key in changed},
                seed=values["SEED"],
                fold=values["DATA.FOLD"] if values["DATA.FOLDS"] else None,
                state=state,
                step=record.status.get("step", 0),
                code=code,
                reason="" if state == "finished" else " ".join(reason.split())[:500],
                metric=results[-1].get(metric.name),
                best=(max if metric.higher_is_better else min)(known, default=None),
                test=tests[-1].get(metric.name),
                images_per_second=statistics.median(speeds) if speeds else None,
                memory_mib=max((point["mem"] for point in steps if "mem" in point), default=None),
                seconds=record.training_seconds() if steps else None,
            )
        )
    return rows


def write_table(result: SweepResult) -> None:
    """Write the results of a sweep to summary.csv, summary.md and runs.csv in its folder. Raises
    ConfigError if the folder cannot be written."""
    folder = result.folder
    with os_error_as(ConfigError, f"--output {folder}"):
        replace_text(folder / "summary.csv", to_csv(result.rows, result.metric))
        replace_text(folder / "runs.csv", to_csv(result.runs, result.metric))
        page = f"# {folder.resolve().name}\n\n{result.text}\n{SPREAD} Measured on {processor()}.\n"
        replace_text(folder / "summary.md", page)


# SLURM

SCRIPT = """\
#!/usr/bin/env bash
# One run of a sweep per task. Written by vil sweep --slurm; submit it with sbatch.
#SBATCH --job-name={name}
#SBATCH --array={tasks}
#SBATCH --ntasks=1
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="{path}/output/slurm-%A_%a.txt"
{options}cd {cwd}
sweep={folder} runs=({names})
run=${{runs[$SLURM_ARRAY_TASK_ID]}} started=$(mktemp)
{command} --config-file "$sweep/configs/$run.yaml" --output_dir "$sweep/runs/$run" \\
    >>"$sweep/output/$run.txt" 2>&1 &
trap "kill -TERM $!" USR1 TERM
code=0
while kill -0 $! 2>/dev/null; do   # a signal ends the wait, not the run
    wait $! && code=0 || code=$?
done
# saved by this task (torchrun exits with 1 then), or stopped before there was anything to save
status=$sweep/runs/$run/status.json
if [ $code = 143 ] || {{ [ "$status" -nt "$started" ] && grep -q '"code": 75' "$status"; }}; then
    echo "back into the queue"
    # the job id of the last task is that of the whole array
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
rm "$started"
exit $code
"""


def format_script(
    runs: Sequence[SweepRun], options: str, *, jobs: int | None = None, num_processes: int = 1
) -> str:
    """Return the sbatch script that trains runs of a sweep as a job array.

    options: options of sbatch, such as "--gres=gpu:1 --time=2:00:00". jobs: maximum number of runs
    at a time.
    """
    try:
        words = shlex.split(options)
    except ValueError as error:  # a quote without its end
        raise ConfigError(f"--slurm {options!r}: {error}") from None
    if words and not words[0].startswith("-"):
        raise ConfigError(f"--slurm {options!r}: expected options of sbatch, got {words[0]!r}")
    folder = runs[0].sweep.resolve()
    return SCRIPT.format(
        path=folder,
        folder=shlex.quote(str(folder)),
        name=re.sub(r"[^\w.-]", "_", folder.name),
        tasks=f"0-{len(runs) - 1}" + (f"%{jobs}" if jobs else ""),
        options=f"#SBATCH {' '.join(options.splitlines())}\n" if words else "",
        cwd=shlex.quote(os.getcwd()),
        names=shlex.join(run.name for run in runs),
        command=shlex.join(train_command(num_processes)),
    )


def write_script(runs: Sequence[SweepRun], script: str) -> Path:
    """Write all runs of a sweep, and the script of its job array, to its folder. Returns the file
    of the script. Raises ConfigError if the folder cannot be written."""
    write_plan(runs)
    file = runs[0].sweep / "sweep.sbatch"
    with os_error_as(ConfigError, f"--output {file}"):
        replace_text(file, script)
    return file
