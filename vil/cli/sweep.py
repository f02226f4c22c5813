"""Train every combination of settings, and compare the results in one table.

  vil sweep --config-file digits/vil_nano.yaml --output sweeps/attentions \\
      "MODEL.VIT.MSVIT.ATTN_TYPE=[full, longformer]" "SEED=[0, 1, 2]" OPTIM.EPOCHS 3
  vil sweep --grid my_sweep.yaml                      the settings of a grid file
  vil sweep --grid my_sweep.yaml --dry-run            check all configs, list the runs
  vil sweep --grid my_sweep.yaml --jobs 2             two at a time, each with half of the cores
  vil sweep --grid my_sweep.yaml --slurm="--gres=gpu:1 --time=4:00:00" --jobs 8
  vil sweep --output sweeps/attentions                resume the runs of a folder
  vil sweep --output sweeps/attentions --table        the results and states so far

If a config key that takes one value is given a list, there is a run for each value in the list. All
configs are checked before the first run starts. If the same command is given again, it resumes the
sweep: finished runs are skipped, others resume from their checkpoints, and failed runs are tried
again. If the grid has more values than before, runs are added. On Ctrl-C and SIGTERM, the runs save
their state and the sweep ends.

Files in the output folder: summary.csv and summary.md (a row for each combination, with the mean
and standard deviation of the metrics over the seeds and the folds of a cross-validation, the number
of runs, images/s, memory, parameters and MACs), runs.csv (a row for each run), and runs/<run>, the
folders of vil train. docs/guides/sweep.md describes grid files.
"""

import argparse
import shutil
import subprocess
from functools import partial
from pathlib import Path

from vil.cli.arguments import at_least, config_arguments, options_of
from vil.utils.errors import ConfigError
from vil.utils.plural import plural
from vil.utils.text_table import align


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser, output="folder of the sweep (sweeps/<name of the grid or config>)")
    add = parser.add_argument
    add("--grid", metavar="FILE", help="YAML file of a sweep, see docs/guides/sweep.md")
    add("--jobs", type=at_least(1), metavar="N", help="runs in parallel (1; SLURM: no limit)")
    text = "number of processes of each run, started by torchrun (1)"
    add("--nproc", type=at_least(1), default=1, metavar="N", help=text)
    text = "check all configs and list the runs; with --slurm, print the script"
    add("--dry-run", action="store_true", help=text)
    add("--table", action="store_true", help="only write the table of the results so far")
    text = "submit the runs as a job array, with these options of sbatch"
    add("--slurm", nargs="?", const="", metavar="OPTIONS", help=text)


def run(args: argparse.Namespace) -> int:
    from vil.workflows import sweep

    name = args.grid or args.config_file
    if args.output_dir is None and name is None:
        raise ConfigError("expected a folder for the sweep: add --output DIR")
    folder = Path(args.output_dir or Path("sweeps", Path(name).stem))
    options = options_of(args)
    words = [*options.words, *([] if args.seed is None else [f"SEED={args.seed}"])]
    trains = not (args.table or args.dry_run or args.slurm is not None)
    result = sweep.sweep(
        args.config_file, words, output_dir=folder, file=args.grid, data=args.data,
        imports=options.imports, jobs=args.jobs or 1, num_processes=args.nproc, train=trains,
        say=partial(print, flush=True),
    )  # fmt: skip
    if trains:
        print(f"\n{result.text}\n{folder / 'summary.md'}")
        return result.code
    if args.table:
        if not (folder / "sweep.json").is_file():
            message = f"{folder} has no sweep yet; to start one, leave out this flag"
            raise ConfigError(f"--table: {message}")
        sweep.write_table(result)
        print(result.text, end="")
        return 0
    print(f"{plural(len(result.runs), 'run')} in {folder}; every config is valid")
    if args.dry_run:
        print(align([[row.name, row.state, row.reason] for row in result.runs], num_left=3))
    unfinished = [run for run, row in zip(result.plan, result.runs) if row.state != "finished"]
    if args.slurm is None:
        return 0
    if not unfinished:
        print("all runs have finished")
        return 0
    more = dict(jobs=args.jobs, num_processes=args.nproc)
    script = sweep.format_script(unfinished, args.slurm, **more)
    if args.dry_run:
        print(f"\n{script}", end="")
        return 0
    file = sweep.write_script(result.plan, script)
    if shutil.which("sbatch"):
        return subprocess.run(["sbatch", str(file)]).returncode
    print(f"this machine has no sbatch; submit the runs on the cluster: sbatch {file}")
    return 0
