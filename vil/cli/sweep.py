"""Train every combination of settings, and compare the results in one table.

  vil sweep --config-file digits/vil_nano.yaml --output sweeps/attentions \\
      "MODEL.VIT.MSVIT.ATTN_TYPE=[full, longformer]" "SEED=[0, 1, 2]" OPTIM.EPOCHS 3
  vil sweep --grid my_sweep.yaml                      the settings of a grid file
  vil sweep --grid my_sweep.yaml --dry-run            check all configs, list the runs
  vil sweep --grid my_sweep.yaml --list               the state of each run
  vil sweep --grid my_sweep.yaml --jobs 2             two at a time, each with half of the cores
  vil sweep --grid my_sweep.yaml --slurm="--gres=gpu:1 --time=4:00:00" --jobs 8
  vil sweep --output sweeps/attentions                resume the runs of a folder
  vil sweep --output sweeps/attentions --table        the table of the finished runs

If a config key that takes one value is given a list, there is a run for each value in the list. All
configs are checked before the first run starts. If the same command is given again, it resumes the
sweep: finished runs are skipped, others resume from their checkpoints, and failed runs are tried
again. If the grid has more values than before, runs are added. On Ctrl-C and SIGTERM, the runs save
their state and the sweep ends.

Files in the output folder: summary.csv and summary.md (a row for each combination, with the mean
and standard deviation of the metrics over the seeds, images/s, memory, parameters and MACs),
runs.csv (a row for each run), plots/, and runs/<run>, the folders of vil train.
docs/guides/sweep.md describes grid files.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from vil.cli.arguments import at_least, config_arguments, options_of
from vil.utils.errors import ConfigError
from vil.utils.text_table import align
from vil.workflows.sweeping.grid import Grid, plain, short_key
from vil.workflows.sweeping.plan import SweepPlan, SweepRun, plan_sweep, write_plan
from vil.workflows.sweeping.source import make_grid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser, output="folder of the sweep (sweeps/<name of the grid or config>)")
    add = parser.add_argument
    add("--grid", metavar="FILE", help="YAML file of a sweep, see docs/guides/sweep.md")
    add("--jobs", type=at_least(1), metavar="N", help="runs in parallel (1; SLURM: no limit)")
    text = "number of processes of each run, started by torchrun (1)"
    add("--nproc", type=at_least(1), default=1, metavar="N", help=text)
    text = "check all configs and list the runs; with --slurm, print the script"
    add("--dry-run", action="store_true", help=text)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--list", action="store_true", help="print the state of each run")
    add("--table", action="store_true", help="only write the table of the finished runs")
    text = "submit the runs as a job array, with these options of sbatch"
    add("--slurm", nargs="?", const="", metavar="OPTIONS", help=text)
    add("--task", type=at_least(0), metavar="N", help="train run N only, as a task of the array")


def run(args: argparse.Namespace) -> int:
    plan = plan_sweep(grid_of(args), output_of(args))
    if args.list:
        return print_states(plan)
    from vil.workflows import sweep
    from vil.workflows.sweeping import results

    sizes = sweep.check_models(plan)
    if args.dry_run:
        print_plan(plan)
    if args.slurm is not None:
        return submit(plan, args)
    if args.dry_run:
        return 0
    if args.table:
        require_sweep(plan.folder, "--table")
        table = results.make_table(plan, sizes)
        files = results.write_table(plan.folder, table)
        return print_table(table, files)
    result = sweep.run_sweep(
        plan,
        sizes,
        only=None if args.task is None else find_run(plan, args.task),
        jobs=args.jobs or 1,
        num_processes=args.nproc,
        say=lambda line: print(line, flush=True),
    )
    print_table(result.table, [plan.folder / "summary.md"])
    return result.code


def grid_of(args: argparse.Namespace) -> Grid:
    """Build the grid, which has the settings of all runs of the sweep, from the grid file, the
    config file and the command-line options."""
    options = options_of(args)
    flags = {key: value for key, value in options.flags.items() if key != "OUTPUT_DIR"}
    seed = [f"SEED={flags.pop('SEED')}"] if flags["SEED"] is not None else []
    words = [*options.words, *seed]
    file = args.config_file
    return make_grid(file, words, file=args.grid, flags=flags, imports=options.imports)


def output_of(args: argparse.Namespace) -> Path:
    """Return the folder of the sweep: --output or, by default, sweeps/<name of the grid file or
    config file>."""
    name = args.grid or args.config_file
    if args.output_dir is None and name is None:
        raise ConfigError("expected a folder for the sweep: add --output DIR")
    return Path(args.output_dir or Path("sweeps", Path(name).stem))


def find_run(plan: SweepPlan, number: int) -> SweepRun:
    """Return run `number`, counted from 0. Raises ConfigError if there is no such run, or if the
    folder has no sweep yet."""
    if number >= len(plan.runs):
        raise ConfigError(f"--task {number}: {plan.folder} has runs 0 to {len(plan.runs) - 1}")
    require_sweep(plan.folder, f"--task {number}")
    return plan.runs[number]


def require_sweep(folder: Path, flag: str) -> None:
    """Raise ConfigError if a folder has no sweep.json, which lists the runs of a sweep.

    flag: the flag that needs the sweep, for the message.
    """
    if not (folder / "sweep.json").is_file():
        raise ConfigError(
            f"{flag}: {folder} has no sweep yet; to start one, leave out this flag or replace it "
            "by --slurm"
        )


def print_plan(plan: SweepPlan) -> None:
    """Print one line per run: name, state, name of its variant in the grid file (if any), and
    values of the config keys that the sweep varies."""
    from vil.workflows.sweeping.state import read_state

    print(f"{len(plan.runs)} runs in {plan.folder}; every config is valid")
    rows = [[run.name, read_state(run).state, describe(run, plan)] for run in plan.runs]
    print(align(rows, num_left=3))


def print_states(plan: SweepPlan) -> int:
    """Print one line per run: state, number of finished steps, and the reason of a failure. Then
    print the number of runs in each state. Returns the exit code."""
    from vil.workflows.sweeping.state import read_state

    states = [(run, read_state(run)) for run in plan.runs]
    rows = [[r.name, s.state, f"step {s.step}" if s.step else "", s.reason] for r, s in states]
    print(align(rows, num_left=4))
    counts = Counter(state.state for _, state in states)
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 0


def describe(run: SweepRun, plan: SweepPlan) -> str:
    """Describe how a run differs from the other runs of the sweep. The text, such as "linformer
    SEED=0", has the name of the run's variant in the grid file (if any), and the run's values of
    the config keys that the sweep varies."""
    values = [f"{short_key(key, plan.keys)}={plain(v)}" for key, v in run.settings.items()]
    return " ".join([*([run.variant] if run.variant else []), *values])


def submit(plan: SweepPlan, args: argparse.Namespace) -> int:
    """Write a SLURM script that trains the unfinished runs of a sweep as a job array, and submit it
    if this machine has sbatch. With --dry-run, only print the script. Returns the exit code."""
    from vil.workflows.sweeping import slurm
    from vil.workflows.sweeping.state import read_state

    tasks = [i for i, run in enumerate(plan.runs) if read_state(run).state != "finished"]
    if not tasks:
        print("all runs have finished")
        return 0
    text = slurm.format_script(
        plan.folder, tasks, options=args.slurm, jobs=args.jobs, num_processes=args.nproc
    )
    if args.dry_run:
        print(f"\n{text}", end="")
        return 0
    write_plan(plan)
    script = slurm.write_script(plan.folder, text)
    job = slurm.submit(script)
    if job is None:
        print(f"this machine has no sbatch; submit the runs on the cluster: sbatch {script}")
    else:
        print(
            f"submitted job {job} with {len(tasks)} runs: vil sweep --output {plan.folder} --list "
            "shows their states"
        )
    return 0


def print_table(table: Any, files: list[Path]) -> int:
    from vil.workflows.sweeping.results import format_summary

    print(f"\n{format_summary(table)}\n")
    for file in files:
        print(file)
    return 0
