"""Helpers of the benchmark scripts: parser, training, timing in turns, results."""

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

import vil
from vil.cli import main
from vil.report.run_record import metrics
from vil.report.sweep_table import GroupRow
from vil.utils.interleaved_timer import Candidate, time_interleaved
from vil.utils.machine import processor
from vil.utils.text_table import align

MIB = 2**20
CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results"


def make_parser(doc: str) -> argparse.ArgumentParser:
    """A parser that prints the script's docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_json(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """Add --json, the file of the results."""
    text = "write the results to this file" + (f" (default: {default.name})" if default else "")
    parser.add_argument("--json", metavar="FILE", type=Path, default=default, help=text)


def write_json(file: Path | None, result: dict) -> None:
    """Write a result, if a file is given."""
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{file}")


def run_vil(command: str, config: str, folder: Path, *options: str) -> None:
    """Run a command of vil into a folder. Ends the script if it fails."""
    words = ["--config-file", config, "--output_dir", str(folder), "LOG_FREQ=1000"]
    if main([command, *words, *options]):
        raise SystemExit(f"vil {command} of {config} failed")


def train(config: str, folder: Path, *options: str) -> list[float]:
    """Train into a folder; return top-1 of every evaluation."""
    run_vil("train", config, folder, *options)
    return read_top1(folder)


def train_variants(
    config: str, folder: Path, fixed: Mapping, variants: Mapping, seeds: Sequence[int], **options
) -> dict[str, GroupRow]:
    """Train every variant with every seed, two runs at a time. Return {variant: results}. A run of
    the folder that has finished is not repeated. Ends the script if a run fails."""
    names = {name: re.sub(r"[^\w+-]", "_", name) for name in variants}  # as folders
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
    """Run a script: parse --folder and --json, call compare(folder of the runs), print its table
    and write what it returns.

    doc: the script's docstring. file: default of --json in the folder of results. metric: key of
    the result under which it has {variant: value of each seed}. Adds their medians to the result.
    """
    parser = make_parser(doc)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
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
    """Top-1 of every evaluation of a run."""
    lines = metrics(folder / "metrics.jsonl")
    return [line["top1"] for line in lines if line["split"].startswith("val")]


def time_in_turns(
    functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each function in each round, after a warm-up."""
    candidates = {name: Candidate(call, lambda out: ()) for name, call in functions.items()}
    times, failed = time_interleaved(candidates, rounds, device, exempt=list(candidates))
    assert not failed, failed
    return {name: times[name].forward for name in functions}
