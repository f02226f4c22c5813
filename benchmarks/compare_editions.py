"""Compare two checkouts of vil on this machine: are the weights bitwise equal, and is one faster?

  .venv/bin/python benchmarks/compare_editions.py OLD NEW                 numbers, then speed
  .venv/bin/python benchmarks/compare_editions.py OLD NEW --only numbers --out FILE
  .venv/bin/python benchmarks/compare_editions.py OLD NEW --only numbers --case nano --epochs 1
  .venv/bin/python benchmarks/compare_editions.py OLD NEW --only speed --rounds 5 --case import

OLD and NEW are checkouts, each with the package installed in its .venv. The comparison uses only
the public interface of both: the command line, `vil.get_model` and `vil.ops`.

numbers: both checkouts train each case in a temporary folder, with the same seed and number of
threads. The weights, averaged weights and optimizer state of the last checkpoint are compared bit
for bit, and the metrics that OLD logs are compared exactly. The exit code is 1 if anything differs.

speed: both checkouts run each measure in alternating order. NEW/OLD is the ratio of the medians.
The spread compares OLD with itself: it is the relative difference between the medians of the odd
and the even rounds. A ratio that differs from 1 by at most the spread + 2 % counts as no
difference. Run this on an idle machine.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from edition_worker import IN_PROCESS
from safetensors.torch import load_file

from vil.utils.machine import machine

EPOCHS, STEPS, ROUNDS = 3, 40, 15
MORE_ROUNDS = 4  # factor of the number of rounds, for a measure of less than a second
TOLERANCE = 0.02
EPOCH_STEPS = 44  # steps of an epoch of the digits, in batches of 32
WORKER = Path(__file__).resolve().with_name("edition_worker.py")
PREEMPTED = 75  # exit code of a run after SIGTERM
DIGITS = ("train", "--config-file", "digits/vil_nano.yaml", "DEVICE=cpu")
TIMINGS = ("wall", "time", "data", "img/s", "mem")  # keys in metrics.jsonl that are not compared
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
UNSET = (*TORCHRUN, "PT_DATA_DIR", "PT_OUTPUT_DIR", "PYTHONPATH")


class Failure(Exception):
    """Error for a command of one of the checkouts that failed."""


@dataclass(frozen=True)
class Edition:
    """A checkout of vil, whose commands run with its own Python.

    name: OLD or NEW. path: folder of the checkout. threads: threads of each process. work: folder
    for data and caches, and current folder of the commands.
    """

    name: str
    path: Path
    threads: int
    work: Path

    def start(self, *words: object, **options: Any) -> subprocess.Popen:
        """Start Python in the work folder, with `threads` threads and without tuned backends.
        words: arguments of Python. options: passed to Popen."""
        env = {name: value for name, value in os.environ.items() if name not in UNSET}
        env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        env["VIL_CACHE"] = str(self.work / "cache")
        command = [str(self.path / ".venv/bin/python"), *map(str, words)]
        return subprocess.Popen(command, cwd=self.work, env=env, text=True, **options)

    def run(self, *words: object, code: int = 0) -> str:
        """Run Python and return its output. Raises Failure if the exit code is not `code`."""
        with self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate()
        if process.returncode != code:
            command = " ".join(map(str, words))
            ended = f"exit code {process.returncode}, expected {code}"
            raise Failure(f"{self.name}: {command}: {ended}\n{out}\n{err}".strip())
        return out

    def commit(self) -> str:
        """Return the commit of the checkout. Raises Failure if its .venv imports vil from another
        folder."""
        file = self.run("-c", "import vil; print(vil.__file__)").strip()
        if not Path(file).resolve().is_relative_to(self.path):
            raise Failure(f"{self.name}: its .venv imports {file}, not {self.path}")
        command = ["git", "-C", str(self.path), "describe", "--always", "--dirty"]
        shown = subprocess.run(command, capture_output=True, text=True)
        return shown.stdout.strip() or "unknown"


# ---------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Case:
    """A run that both checkouts train.

    words: command line of `vil`. processes: number of training processes. preempted: OLD starts the
    run, SIGTERM stops it within an epoch, and both checkouts resume it.
    """

    words: tuple[str, ...]
    processes: int = 1
    preempted: bool = False

    def command(self, folder: Path, *more: str) -> list[object]:
        """Return the arguments of Python that train the run in a folder. more: more arguments of
        the command."""
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc_per_node={self.processes}"]
        launcher = torchrun if self.processes > 1 else []
        return [*launcher, "-m", "vil", *self.words, "--output_dir", folder, *more]


def make_cases(epochs: int, steps: int) -> dict[str, Case]:
    """Return {name: case}. epochs: epochs of the runs on the digits. steps: training steps of the
    detector."""
    digits = (*DIGITS, f"OPTIM.EPOCHS={epochs}", "SOLVER.WARMUP_EPOCHS=0.5", "RUN.EVAL_EVERY=1")
    digits += ("LOG_FREQ=4",)
    scenes = ("train", "--config-file", "scenes/mask_rcnn_vil_nano.yaml", "DEVICE=cpu")
    scenes += ("--data", "data", "OPTIM.EPOCHS=1", "DATALOADER.WORKERS=0", "LOG_FREQ=4")
    shift = ("MODEL.VIT.MSVIT.MODE=1", "AUG.MIXUP_PROB=1.0", "AUG.MIXUP=0.8", "OPTIM.EMA=0.9")
    return {
        "nano": Case((*digits, *shift, "DATALOADER.WORKERS=2")),
        "bfloat16": Case((*digits, "AMP.ENABLED=True", "AMP.DTYPE=bfloat16")),
        "detector": Case((*scenes, f"DATA.KWARGS={{train: {2 * steps}, val: 4}}")),
        "resnet18": Case((*digits, "MODEL.ARCH=timm/resnet18")),
        "two-processes": Case((*digits, "DATALOADER.WORKERS=1"), processes=2),
        "interrupted": Case((*digits, *shift, "DATALOADER.WORKERS=1"), preempted=True),
    }


def last_checkpoint(run: Path) -> Path:
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    if not checkpoints:
        raise Failure(f"{run} has no checkpoint")
    return checkpoints[-1]


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return {file/name: tensor} for the weights, averaged weights and optimizer state of a
    checkpoint."""
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)["optimizer"]
    tensors = {
        f"state.pt/{parameter}/{name}": value
        for parameter, row in state.items()
        for name, value in row.items()
    }
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {f"{file.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return tensors


def to_bytes(value: Any) -> tuple:
    """Return the type, shape and bytes of a value, for a comparison in which 0.0 and -0.0 differ
    and NaN equals NaN."""
    if not isinstance(value, torch.Tensor):
        return (type(value), value)
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return (value.dtype, tuple(value.shape), flat.numpy().tobytes())


def differing_tensors(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List the tensors that differ, or that only one of two checkpoints has."""
    absent = [f"{name} (only in one)" for name in old.keys() ^ new.keys()]
    both = [name for name in old if name in new]
    return absent + [name for name in both if to_bytes(old[name]) != to_bytes(new[name])]


def read_metrics(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl as dicts, without times and memory."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if key not in TIMINGS} for line in lines]


def differing_metrics(old: list[dict], new: list[dict]) -> list[str]:
    """List the metrics of OLD that are different or missing in NEW. NEW may log metrics that OLD
    does not log. old, new: lines of metrics.jsonl."""
    if len(old) != len(new):
        return [f"metrics.jsonl ({len(old)} and {len(new)} lines)"]
    # compare repr, because NaN is not equal to itself
    return [
        f"metrics.jsonl, step {line['step']}, {line['split']}: {key} {value}, {other.get(key)}"
        for line, other in zip(old, new)
        for key, value in line.items()
        if repr(value) != repr(other.get(key))
    ]


def logged_steps(run: Path) -> int:
    """Return the step in the last line of metrics.jsonl; 0 if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    return 0


def train_and_preempt(case: Case, edition: Edition, run: Path, timeout: float = 600) -> None:
    """Train in the folder `run`, and send SIGTERM in the middle of an epoch. Raises Failure if the
    run does not end as preempted within an epoch. timeout: seconds until the run is killed."""
    end = time.monotonic() + timeout
    log = run.with_suffix(".txt")
    with log.open("w") as file:
        process = edition.start(*case.command(run), stdout=file, stderr=file)
        while process.poll() is None and not 8 <= logged_steps(run) % EPOCH_STEPS <= 32:
            if time.monotonic() > end:
                process.kill()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    if code != PREEMPTED:
        raise Failure(f"{edition.name}: SIGTERM ended the run with {code}\n{log.read_text()}")
    if int(last_checkpoint(run).name.removeprefix("step-")) % EPOCH_STEPS == 0:
        raise Failure(f"{edition.name}: SIGTERM came at the end of an epoch")


def train(case: Case, editions: list[Edition], work: Path) -> list[Path]:
    """Train a case with both checkouts. Returns the run folders of OLD and NEW."""
    runs = [work / edition.name for edition in editions]
    if case.preempted:
        train_and_preempt(case, editions[0], runs[0])
        shutil.copytree(runs[0], runs[1])
    for edition, run in zip(editions, runs):
        edition.run(*case.command(run, *["--resume"] * case.preempted))
    return runs


def compare_numbers(cases: dict[str, Case], editions: list[Edition], work: Path) -> list[dict]:
    """Train all cases with both checkouts and compare the runs. Prints a line per case and returns
    the results."""
    rows = []
    for name, case in cases.items():
        (work / name).mkdir()
        start = time.monotonic()
        try:
            runs = train(case, editions, work / name)
            steps = [last_checkpoint(run) for run in runs]
            tensors = [read_checkpoint(folder) for folder in steps]
            differences = differing_metrics(*map(read_metrics, runs)) + differing_tensors(*tensors)
            if steps[0].name != steps[1].name:
                differences.insert(0, " and ".join(folder.name for folder in steps))
            compared = f"{steps[0].name}, {len(tensors[0])} tensors"
        except Failure as failure:
            differences, compared = [str(failure)], "failed"
        ending = f"DIFFERS, {len(differences)}: {differences[0]}" if differences else "equal"
        print(f"{name:14} {compared:28} {time.monotonic() - start:5.0f} s  {ending}", flush=True)
        row = {"case": name, "equal": not differences, "compared": compared}
        rows.append(row | {"differences": differences[:20]})
        shutil.rmtree(work / name)
    return rows


# ------------------------------------------------------------------------------------------ speed


# {name: (exit code, arguments of Python)}; timed from the start of the process to its end
COMMANDS = {
    "import vil": (0, ("-c", "import vil")),
    "vil --help": (0, ("-m", "vil", "--help")),
    "wrong key": (2, ("-m", "vil", "train", "OPTIM.LRR", "1")),
}
EPOCH = "digits epoch"
MEASURES = (*IN_PROCESS, *COMMANDS, EPOCH)


class Worker:
    """A process of a checkout that runs measures of edition_worker.py on request."""

    def __init__(self, edition: Edition) -> None:
        self.edition = edition
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = edition.start(WORKER, **pipes)

    def measure(self, name: str) -> float:
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise Failure(f"{self.edition.name}: the worker ended during {name!r}")
        return float(answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure_once(name: str, worker: Worker) -> float:
    """Run a measure once and return its time in seconds."""
    if name in IN_PROCESS:
        return worker.measure(name)
    if name in COMMANDS:
        code, words = COMMANDS[name]
        start = time.perf_counter()
        worker.edition.run(*words, code=code)
        return time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:  # time of the second epoch, from the log
        words = [*DIGITS, "--output_dir", folder, "OPTIM.EPOCHS=2", "RUN.EVAL_EVERY=2"]
        worker.edition.run("-m", "vil", *words, f"LOG_FREQ={EPOCH_STEPS}")
        lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
        first, second = (line["wall"] for line in lines if line["split"] == "train")
    return second - first


def measure_in_turns(name: str, workers: list[Worker], rounds: int) -> dict[str, Any]:
    """Measure both checkouts in alternating order, after a warm-up. Returns a dict of results."""
    warm = max(measure_once(name, worker) for worker in workers)
    if name == EPOCH:
        rounds = max(2, rounds // 3)
    elif warm < 1:
        rounds *= MORE_ROUNDS
    times: dict[str, list[float]] = {worker.edition.name: [] for worker in workers}
    for number in range(rounds):
        for worker in workers if number % 2 else reversed(workers):
            times[worker.edition.name].append(measure_once(name, worker))
    old, new = times.values()
    row = {"measure": name, "old": old, "new": new, "spread": 0.0, "quartiles": 0.0}
    row["ratio"] = statistics.median(new) / statistics.median(old)
    if rounds > 1:
        even, odd = (statistics.median(old[start::2]) for start in (0, 1))
        low, middle, high = statistics.quantiles(old, n=4, method="inclusive")
        row |= {"spread": max(even, odd) / min(even, odd) - 1, "quartiles": (high - low) / middle}
    return row | {"same": abs(row["ratio"] - 1) <= row["spread"] + TOLERANCE}


def compare_speed(names: list[str], editions: list[Edition], rounds: int) -> list[dict]:
    """Run all measures with both checkouts. Prints a line per measure and returns the results."""
    print(f"{'median, ms':34} {'OLD':>9} {'NEW':>9} {'NEW/OLD':>8} {'spread':>7} {'IQR':>7}")
    workers, rows = [Worker(edition) for edition in editions], []
    try:
        for name in names:
            row = measure_in_turns(name, workers, rounds)
            old, new = (1e3 * statistics.median(row[key]) for key in ("old", "new"))
            end = "" if row["same"] else "  <- slower" if row["ratio"] > 1 else "  <- faster"
            cells = f"{old:9.1f} {new:9.1f} {row['ratio']:8.3f} {row['spread']:7.1%}"
            print(f"{name:34} {cells} {row['quartiles']:7.1%}{end}", flush=True)
            rows.append(row)
    finally:
        for worker in workers:
            worker.close()
    return rows


# ------------------------------------------------------------------------------------------------


def compare(part: str, names: list[str], args: argparse.Namespace, folder: Path) -> dict:
    """Run a part of the comparison, "numbers" or "speed". Returns the machine and the results."""
    threads = args.threads or (1 if part == "numbers" else os.cpu_count() or 1)
    editions = []
    for name, path in (("OLD", args.old), ("NEW", args.new)):
        work = folder / part / name
        work.mkdir(parents=True)
        editions.append(Edition(name, path.resolve(), threads, work))
    about = machine(torch.device("cpu")) | {"threads": threads, "load": os.getloadavg()[0]}
    about |= {edition.name: edition.commit() for edition in editions}
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    if part == "speed":
        return {"machine": about, "rows": compare_speed(names, editions, args.rounds)}
    cases = make_cases(args.epochs, args.steps)
    cases = {name: cases[name] for name in names}
    return {"machine": about, "rows": compare_numbers(cases, editions, folder / part)}


def main() -> int:
    cases = list(make_cases(1, 1))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD", type=Path, help="folder of the old checkout")
    parser.add_argument("new", metavar="NEW", type=Path, help="folder of the new checkout")
    parser.add_argument("--only", choices=("numbers", "speed"), help="run only this part")
    names = "run only cases whose names begin with NAME; may be repeated. Cases: "
    names += ", ".join((*cases, *MEASURES))
    parser.add_argument("--case", action="append", metavar="NAME", help=names)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"epochs on digits ({EPOCHS})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"detector's steps ({STEPS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed rounds ({ROUNDS})")
    parser.add_argument("--threads", type=int, help="default: 1 for numbers, all cores for speed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args()
    selected = {
        part: [name for name in known if name.startswith(tuple(args.case or [""]))]
        for part, known in (("numbers", cases), ("speed", MEASURES))
        if args.only in (None, part)
    }
    if not any(selected.values()):
        parser.error(f"--case {' '.join(args.case)}: no name begins with it; see --help")
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(prefix="vil-editions-") as folder:
        for part, names in selected.items():
            if names:
                results[part] = compare(part, names, args, Path(folder))
                if args.out:
                    args.out.write_text(json.dumps(results, indent=1) + "\n")
                print()
    numbers = results.get("numbers", {"rows": []})
    return int(not all(row["equal"] for row in numbers["rows"]))


if __name__ == "__main__":
    sys.exit(main())
