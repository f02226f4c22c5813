"""Functions that several benchmark scripts use: parser, training, interleaved timing, results."""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

import vil
from vil.cli import main
from vil.report.run_record import metrics
from vil.report.sweep_table import GroupRow
from vil.utils.interleaved_timer import Candidate, time_interleaved
from vil.utils.machine import processor, search_file
from vil.utils.text_table import align

MIB = 2**20
CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Return an argument parser whose --help shows the script's docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_json(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """Add the argument --json, the file to which the results are written."""
    text = "write the results to this file" + (f" (default: {default.name})" if default else "")
    parser.add_argument("--json", metavar="FILE", type=Path, default=default, help=text)


def write_json(file: Path | None, result: dict) -> None:
    """Write a result as JSON and print the file's path. Does nothing if `file` is None."""
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{file}")


def run_vil(command: str, config: str, folder: Path, *options: str) -> None:
    """Run a `vil` command with a config and an output folder. Ends the script if it fails."""
    words = ["--config-file", config, "--output_dir", str(folder), "LOG_FREQ=1000"]
    if main([command, *words, *options]):
        raise SystemExit(f"vil {command} of {config} failed")


def train(config: str, folder: Path, *options: str) -> list[float]:
    """Train a config in a run folder. Returns top-1 of each evaluation."""
    run_vil("train", config, folder, *options)
    return read_top1(folder)


def train_apart(config: str, folder: Path, epochs: int, *words: str) -> Path:
    """Train in a process of its own, and evaluate at the end only."""
    warmup = min(1, epochs - 1)
    options = [f"OPTIM.EPOCHS={epochs}", f"RUN.EVAL_EVERY={epochs}", "EVAL.METRIC=loss"]
    options += [f"SOLVER.WARMUP_EPOCHS={warmup}", "LOG_FREQ=5", "DATALOADER.WORKERS=0"]
    command = ["train", "--config-file", config, "--output_dir", str(folder), *options, *words]
    subprocess.run([sys.executable, "-m", "vil", *command], check=True, stdout=subprocess.DEVNULL)
    return folder


def seconds_per_epoch(run: Path) -> list[float]:
    """Return the duration of each epoch of a run by its log, without evaluation."""
    lines = [line for line in metrics(run / "metrics.jsonl") if line["split"] == "train"]
    steps = [line["time"] for line in lines]
    epochs = np.ceil([line["epoch"] for line in lines])
    per_epoch = lines[-1]["step"] / lines[-1]["epoch"]
    each = [np.array(steps)[epochs == number] for number in np.unique(epochs)]
    return [float(np.mean(times) * per_epoch) for times in each]


def last_top1(run: Path) -> float:
    """Return top-1 of the last evaluation of a run."""
    lines = [line for line in metrics(run / "metrics.jsonl") if line["split"].startswith("val")]
    return lines[-1]["top1"]


def finish(config: str, folder: Path, *options: str) -> float:
    """Return top-1 after the last epoch of the run in `folder`. If the run is not finished, train
    or resume it first."""
    status = folder / "status.json"
    if status.exists() and json.loads(status.read_text())["state"] == "finished":
        return read_top1(folder)[-1]
    return train(config, folder, "--resume", *options)[-1]


def train_variants(
    config: str, folder: Path, fixed: Mapping, variants: Mapping, seeds: Sequence[int], **options
) -> dict[str, GroupRow]:
    """Train every variant with every seed, two runs at a time. Returns {variant: results}.

    Runs in `folder` that have finished are not repeated. Ends the script if a run fails. fixed:
    {config key: value} of all runs. variants: {variant: {config key: value}}. options: passed to
    `vil.sweep`.
    """
    names = {name: re.sub(r"[^\w+-]", "_", name) for name in variants}  # names of folders
    result = vil.sweep(
        config, {"LOG_FREQ": 1000, **fixed}, grid={"SEED": list(seeds)}, output_dir=folder,
        variants={names[name]: keys for name, keys in variants.items()}, jobs=2, say=print,
        **options,
    )  # fmt: skip
    if result.status != "finished":
        raise SystemExit(f"{folder}: {result.status}")
    rows = {row.name: row for row in result.rows}
    return {name: rows[names[name]] for name in variants}


def compare_seeds(doc: str, file: str, compare: Callable[[Path], dict], metric: str) -> None:
    """Run a script that compares variants with several seeds, and print and write its results.

    doc: the script's docstring. file: default file name of --json, in benchmarks/results. compare:
    function that takes the folder for the runs and returns the results as a dict. Its key `metric`
    has {variant: value for each seed}; the medians over the seeds are added to the results. Its
    keys "seeds" and "chosen" are printed.
    """
    parser = make_parser(doc)
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: temporary")
    add_json(parser, RESULTS / file)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = {"machine": processor(), **compare(args.folder or Path(temporary))}
    found["median"] = {name: statistics.median(values) for name, values in found[metric].items()}
    rows = [["", *map(str, found["seeds"]), "median"]]
    for name, values in found[metric].items():
        rows.append([name, *(f"{value:.2f}" for value in (*values, found["median"][name]))])
    print(f"\n{metric} of each seed; chosen: {found['chosen']}\n{align(rows)}")
    write_json(args.json, found)


def read_top1(folder: Path) -> list[float]:
    """Return top-1 of each evaluation during the training of a run."""
    lines = metrics(folder / "metrics.jsonl")
    return [line["top1"] for line in lines if line["split"].startswith("val")]


def time_in_turns(
    functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Time functions in interleaved rounds, after a warm-up. Returns {name: seconds per round}."""
    candidates = {name: Candidate(call) for name, call in functions.items()}
    times, failed = time_interleaved(candidates, rounds, device, exempt=list(candidates))
    assert not failed, failed
    return {name: each.forward for name, each in times.items()}


def resident_bytes(field: str) -> int | None:
    """Return the resident memory of this process in bytes, or None if the system has no
    /proc/self/status. field: VmRSS (now), VmHWM (peak) or RssAnon (now, without mapped files)."""
    found = search_file(rf"{field}:\s+(\d+) kB", "/proc/self/status")
    return int(found) * 1024 if found else None
