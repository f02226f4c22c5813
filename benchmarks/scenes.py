"""Train detectors on the synthetic scenes, and check that evaluation gives the same metrics again.

  python benchmarks/scenes.py                      all runs, one to three hours
  python benchmarks/scenes.py mask_rcnn retinanet  some runs; the file keeps the other results
  OMP_NUM_THREADS=1 python benchmarks/scenes.py mask_rcnn    on one core

A run is a complete `vil train`, including rendering and evaluation, whose wall-clock and CPU
time are measured. Runs with two processes use torchrun. Then `vil evaluate` evaluates the
last checkpoint again. Metrics are in percent, on the 400 validation scenes, on which the recipe was
also tuned. Metrics, times, machine and number of threads are written to
benchmarks/results/scenes-cpu.json.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from shared import RESULTS, add_json, make_parser

from vil.cli import main
from vil.report.run_record import metrics
from vil.utils.machine import machine

MASKS, BOXES = "scenes/mask_rcnn_vil_nano.yaml", "scenes/retinanet_vil_nano.yaml"
BOTH = {"box_ap50": 70, "mask_ap50": 65}
# {name: (config, options, processes, lower bounds of metrics, upper bound of minutes)}
RUNS = {
    "mask_rcnn": (MASKS, (), 1, BOTH, 25),
    "retinanet": (BOXES, (), 2, {"box_ap50": 60}, 25),
    "mask_rcnn, no pretraining": (MASKS, ("MODEL.MODEL_PATH=",), 1, {}, 25),
    "mask_rcnn, an hour": (MASKS, ("OPTIM.EPOCHS=14",), 1, BOTH, 60),
}
METRICS = ("box_ap", "box_ap50", "mask_ap", "mask_ap50")


def select_metrics(row: dict[str, float]) -> dict[str, float]:
    return {name: row[name] for name in METRICS if name in row}


def train(config: str, options: tuple[str, ...], processes: int) -> dict:
    """Train and evaluate a detector in a temporary folder. Returns the metrics and times."""
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        words = ["train", "--config-file", config, "--data", folder, "--output_dir", run]
        began, before = time.perf_counter(), cpu_seconds()
        if launch([*words, *options], processes):
            raise SystemExit("training failed")
        spent = {"minutes": (time.perf_counter() - began) / 60}
        spent["core_minutes"] = (cpu_seconds() - before) / 60
        last = [line for line in metrics(Path(run, "metrics.jsonl")) if "val" in line["split"]][-1]
        if launch(["evaluate", "--run-dir", run, "--checkpoint", "last"], processes):
            raise SystemExit("evaluation failed")
        again = json.loads(Path(run, "eval/results.json").read_text())["scenes"]
    spent |= {"epochs": last["epoch"], "processes": processes}
    return spent | select_metrics(last) | {"again": select_metrics(again)}


def launch(words: list[str], processes: int) -> int:
    """Run a `vil` command, with the threads divided among the processes. Returns the exit code."""
    if processes == 1:
        return main(words)
    threads = str(max(1, torch.get_num_threads() // processes))
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, "-m", *torchrun, "-m", "vil", *words]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": threads}).returncode


def cpu_seconds() -> float:
    """Return the CPU time of this process and its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def find_misses(name: str, row: dict) -> list[str]:
    """List the bounds in RUNS that a run misses, and whether its second evaluation differs."""
    *_, least, most = RUNS[name]
    misses = [f"{key} below {bound}" for key, bound in least.items() if row[key] < bound]
    misses += [f"more than {most} minutes"] if row["minutes"] > most else []
    return misses + (["evaluated differently"] if row["again"] != select_metrics(row) else [])


def run(names: list[str], path: Path) -> None:
    for name in names:
        config, options, processes, *_ = RUNS[name]
        row = train(config, options, processes) | {"machine": machine(torch.device("cpu"))}
        before = json.loads(path.read_text()) if path.exists() else {}
        rows = before | {name: row}
        path.write_text(json.dumps({n: rows[n] for n in RUNS if n in rows}, indent=1) + "\n")
        shown = "  ".join(f"{key} {row[key]:.2f}" for key in METRICS if key in row)
        wrong = ", ".join(find_misses(name, row))
        print(
            f"{name}: {row['epochs']:g} epochs, {row['minutes']:.1f} min on "
            f"{row['machine']['threads']} threads ({row['core_minutes']:.1f} of cores), processes "
            f"{processes}: {shown}" + (f"  <- {wrong}" if wrong else "")
        )


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"runs: {'; '.join(RUNS)} (all)")
    add_json(parser, RESULTS / "scenes-cpu.json")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in RUNS]:
        parser.error(f"unknown run {', '.join(unknown)} (choices: {'; '.join(RUNS)})")
    run(args.names or list(RUNS), args.json)
