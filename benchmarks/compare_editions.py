"""Compare two checkouts of vil on this machine: the same weights bit for bit, and the same speed.

  .venv/bin/python benchmarks/compare_editions.py OLD NEW                 numbers, then speed
  .venv/bin/python benchmarks/compare_editions.py OLD NEW --only numbers --out FILE
  .venv/bin/python benchmarks/compare_editions.py OLD NEW --only numbers --case nano --epochs 1
  .venv/bin/python benchmarks/compare_editions.py OLD NEW --only speed --rounds 5 --case import

OLD and NEW are checkouts, each with the package installed in its .venv. Only what a user may use is
used of either: the command line, `vil.get_model` and `vil.ops`.

numbers: each case is trained by both editions with the same seed and the same number of threads, in
temporary folders. The last checkpoint's weights, averaged weights and optimizer state are compared
bit for bit, and the logged metrics digit for digit. The exit code is 1 if anything differs.

speed: each measure is taken by both editions in turns, NEW/OLD is the ratio of their medians. The
spread is what OLD differs from itself in the same run: the medians of its odd and even rounds.
A ratio within the spread + 2 % is no difference. Run this on an idle machine.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EPOCHS, STEPS, ROUNDS = 3, 40, 15
SHORT = 4  # times as many rounds of a measure that takes less than a second
TOLERANCE = 0.02
EPOCH_STEPS = 44  # of the digits, in batches of 32
PREEMPTED = 75  # exit code of a run that SIGTERM has stopped
TIMINGS = ("wall", "time", "data", "img/s", "mem")  # of a line of metrics.jsonl
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
UNSET = (*TORCHRUN, "PT_DATA_DIR", "PT_OUTPUT_DIR", "PYTHONPATH")


class Failure(Exception):
    """A command of one of the editions failed."""


@dataclass(frozen=True)
class Edition:
    """A checkout and how its commands are started."""

    name: str  # OLD or NEW
    path: Path
    threads: int
    work: Path  # its folder for data and caches

    @property
    def python(self) -> str:
        return str(self.path / ".venv/bin/python")

    def environment(self) -> dict[str, str]:
        """The same threads for both, and no backends that a user has tuned."""
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        return kept | threads | {"VIL_CACHE": str(self.work / "cache")}

    def start(self, *words: object, **options: Any) -> subprocess.Popen:
        """Start Python with the words, in the edition's folder."""
        return subprocess.Popen(
            [self.python, *map(str, words)], cwd=self.work, env=self.environment(), text=True,
            **options,
        )  # fmt: skip

    def run(self, *words: object, code: int = 0) -> str:
        """Run Python with the words, return its output; Failure for any other exit code."""
        with self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate()
        if process.returncode != code:
            said = f"{out}\n{err}".strip()
            raise Failure(f"{self.name}: {' '.join(map(str, words))}: {process.returncode}\n{said}")
        return out

    def check(self) -> str:
        """Return the commit; Failure if the .venv has the package from elsewhere."""
        file = self.run("-c", "import vil; print(vil.__file__)").strip()
        if not Path(file).resolve().is_relative_to(self.path):
            raise Failure(f"{self.name}: {self.python} imports {file}, not {self.path}")
        command = ["git", "-C", str(self.path), "describe", "--always", "--dirty"]
        shown = subprocess.run(command, capture_output=True, text=True)
        return shown.stdout.strip() or "unknown"


# ---------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Case:
    """A run to train with both editions."""

    words: tuple[str, ...]  # of the command line
    processes: int = 1
    stopped: bool = False  # begun by OLD, stopped in the middle of an epoch, continued by both

    def command(self, folder: Path, *more: str) -> list[object]:
        """Python's arguments that train into the folder."""
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc_per_node={self.processes}"]
        start = launcher if self.processes > 1 else []
        return [*start, "-m", "vil", *self.words, "--output_dir", folder, *more]


def cases(epochs: int, steps: int) -> dict[str, Case]:
    """{name: case}; epochs are those of the digits, steps those of the detector."""
    digits = ("train", "--config-file", "digits/vil_nano.yaml", "DEVICE=cpu", "LOG_FREQ=4")
    digits += (f"OPTIM.EPOCHS={epochs}", "SOLVER.WARMUP_EPOCHS=0.5", "RUN.EVAL_EVERY=1")
    scenes = ("detect", "train", "--config-file", "scenes/mask_rcnn_vil_nano.yaml", "DEVICE=cpu")
    scenes += ("--data", "data", "OPTIM.EPOCHS=1", "DATALOADER.WORKERS=0", "LOG_FREQ=4")
    shift = ("MODEL.VIT.MSVIT.MODE=1", "AUG.MIXUP_PROB=1.0", "AUG.MIXUP=0.8", "OPTIM.EMA=0.9")
    return {
        "nano": Case((*digits, *shift, "DATALOADER.WORKERS=2")),
        "bfloat16": Case((*digits, "AMP.ENABLED=True", "AMP.DTYPE=bfloat16")),
        "detector": Case((*scenes, f"DATA.KWARGS={{train: {2 * steps}, val: 4}}")),
        "resnet18": Case((*digits, "MODEL.ARCH=timm/resnet18")),
        "two-processes": Case((*digits, "DATALOADER.WORKERS=1"), processes=2),
        "interrupted": Case((*digits, *shift, "DATALOADER.WORKERS=1"), stopped=True),
    }


def last_checkpoint(run: Path) -> Path:
    steps = sorted((run / "checkpoints").glob("step-*"))
    if not steps:
        raise Failure(f"{run} has no checkpoint")
    return steps[-1]


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, tensor or number) of every leaf of nested dicts and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}/{index}")
    else:
        yield path, value


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """{file/name: tensor} of weights, averaged weights and optimizer state."""
    import torch
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {f"{file.name}/{name}": tensor for name, tensor in load_file(file).items()}
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    return found | dict(tensors(state["optimizer"], "state.pt/optimizer"))


def bits(value: Any) -> tuple:
    """Type, shape and bytes, which tell 0.0 from -0.0 and find NaN equal to itself."""
    import torch

    if not isinstance(value, torch.Tensor):
        return (type(value), value)
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return (value.dtype, tuple(value.shape), flat.numpy().tobytes())


def differing_tensors(old: Path, new: Path) -> list[str]:
    """Names of what differs between two checkpoints, and of what only one of them has."""
    first, second = read_checkpoint(old), read_checkpoint(new)
    names = dict.fromkeys([*first, *second])
    absent = [f"{name} (only in one)" for name in names if (name in first) != (name in second)]
    both = [name for name in names if name in first and name in second]
    return absent + [name for name in both if bits(first[name]) != bits(second[name])]


def read_metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl without times and memory."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if key not in TIMINGS} for line in lines]


def differing_metrics(old: Path, new: Path) -> list[str]:
    first, second = read_metrics(old), read_metrics(new)
    if len(first) != len(second):
        return [f"metrics.jsonl ({len(first)} and {len(second)} lines)"]
    return [
        f"metrics.jsonl, step {a['step']}, {a['split']}"
        for a, b in zip(first, second)
        if repr(a) != repr(b)  # NaN is equal to itself
    ]


def steps_logged(run: Path) -> int:
    """The step of the last full line of metrics.jsonl."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    return 0


def stop_in_epoch(case: Case, edition: Edition, run: Path, patience: float = 600) -> None:
    """Train into `run` and send SIGTERM between two ends of an epoch."""
    end = time.monotonic() + patience
    log = run.with_suffix(".txt")
    with log.open("w") as file:
        process = edition.start(*case.command(run), stdout=file, stderr=file)
        while process.poll() is None and not 8 <= steps_logged(run) % EPOCH_STEPS <= 32:
            if time.monotonic() > end:
                process.kill()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    if code != PREEMPTED:
        raise Failure(f"{edition.name}: SIGTERM ended the run with {code}\n{log.read_text()}")
    if int(last_checkpoint(run).name.removeprefix("step-")) % EPOCH_STEPS == 0:
        raise Failure(f"{edition.name}: SIGTERM came at the end of an epoch")


def train(case: Case, editions: tuple[Edition, Edition], work: Path) -> list[Path]:
    """The folders of OLD's run and of NEW's."""
    runs = [work / edition.name for edition in editions]
    resume = ["--resume"] if case.stopped else []
    if case.stopped:
        stop_in_epoch(case, editions[0], runs[0])
        shutil.copytree(runs[0], runs[1])
    for edition, run in zip(editions, runs):
        edition.run(*case.command(run, *resume))
    return runs


def compare_numbers(
    table: dict[str, Case], editions: tuple[Edition, Edition], work: Path
) -> list[dict]:
    """Print a line for each case as it is done."""
    results = []
    for name, case in table.items():
        (work / name).mkdir()
        started = time.monotonic()
        try:
            old, new = train(case, editions, work / name)
            checkpoints = [last_checkpoint(run) for run in (old, new)]
            count = len(read_checkpoint(checkpoints[0]))
            differences = differing_metrics(old, new) + differing_tensors(*checkpoints)
            if checkpoints[0].name != checkpoints[1].name:
                differences.insert(0, " and ".join(folder.name for folder in checkpoints))
            text = f"{checkpoints[0].name}, {count} tensors"
        except Failure as failure:
            differences, text = [str(failure)], "failed"
        seconds = time.monotonic() - started
        ending = f"DIFFERS, {len(differences)}: {differences[0]}" if differences else "equal"
        print(f"{name:14} {text:28} {seconds:5.0f} s  {ending}", flush=True)
        row = {"case": name, "equal": not differences, "compared": text}
        results.append(row | {"differences": differences[:20]})
        shutil.rmtree(work / name)
    return results


# ------------------------------------------------------------------------------------------ speed


def attention(
    batch: int, heads: int, dim: int, side: int, size: int, *, calls: int = 1
) -> Callable[[], None]:
    """Forward and backward of local attention, one global token, with both biases."""
    import torch

    from vil.ops import LocalBias, Window, local_attention

    torch.manual_seed(0)
    tokens = side * side
    q = torch.randn(batch, heads, tokens, dim, requires_grad=True)
    k, v = (torch.randn(batch, heads, 1 + tokens, dim, requires_grad=True) for _ in range(2))
    table = torch.randn(heads, (4 * size - 1) ** 2, requires_grad=True)
    to_global = torch.randn(heads, 1, requires_grad=True)
    window, weight = Window((side, side), size), torch.randn(batch, heads, tokens, dim)

    def step() -> None:
        for _ in range(calls):
            bias = LocalBias(table, to_global)
            (local_attention(q, k, v, window, num_global=1, bias=bias) * weight).sum().backward()

    return step


def model_step(training: bool, batch: int = 8) -> Callable[[], None]:
    """A step of vil_tiny at 224 px: forward, backward and AdamW, or forward alone."""
    import torch

    import vil

    torch.manual_seed(0)
    model = vil.get_model("vil_tiny", img_size=224).train(training)
    images, targets = torch.randn(batch, 3, 224, 224), torch.arange(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()

    return step if training else torch.inference_mode()(lambda: model(images))


# Measured in one process of each edition that obeys `Worker`.
IN_PROCESS = {
    "attention 56x56 w8 B2 N12 D64": lambda: attention(2, 12, 64, 56, 8),
    "attention 56x56 w7 B8 N3 D32": lambda: attention(8, 3, 32, 56, 7),
    "attention 14x14 w7 B2 N3 D32, x20": lambda: attention(2, 3, 32, 14, 7, calls=20),
    "vil_tiny training step": lambda: model_step(training=True),
    "vil_tiny evaluation step": lambda: model_step(training=False),
}
# Measured from the start of a process to its end.
COMMANDS = {
    "import vil": (0, ("-c", "import vil")),
    "vil --help": (0, ("-m", "vil", "--help")),
    "wrong key": (2, ("-m", "vil", "train", "OPTIM.LRR", "1")),
}
EPOCH = "digits epoch"
MEASURES = (*IN_PROCESS, *COMMANDS, EPOCH)


def obey() -> None:
    """A worker: read the name of a measure a line, answer with the seconds it took."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    build = functools.cache(lambda name: IN_PROCESS[name]())
    for line in sys.stdin:
        step = build(line.strip())
        started = time.perf_counter()
        step()
        print(time.perf_counter() - started, flush=True)


class Worker:
    """A process of an edition that measures on command."""

    def __init__(self, edition: Edition) -> None:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.edition, self.process = edition, edition.start(Path(__file__).resolve(), "--worker",
                                                            **pipes)  # fmt: skip

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


def process_seconds(edition: Edition, name: str) -> float:
    code, words = COMMANDS[name]
    started = time.perf_counter()
    edition.run(*words, code=code)
    return time.perf_counter() - started


def epoch_seconds(edition: Edition) -> float:
    """The second of two epochs on the digits, between the log lines at their ends."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--config-file", "digits/vil_nano.yaml", "--output_dir", folder]
        words += ["OPTIM.EPOCHS=2", f"LOG_FREQ={EPOCH_STEPS}", "RUN.EVAL_EVERY=2", "DEVICE=cpu"]
        edition.run("-m", "vil", *words)
        lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
        first, second = (line["wall"] for line in lines if line["split"] == "train")
    return second - first


@dataclass(frozen=True)
class Row:
    """The seconds of one measure by both editions, in the order they were taken."""

    measure: str
    old: list[float]
    new: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.new) / statistics.median(self.old)

    @property
    def spread(self) -> float:
        """What the medians of OLD's odd and even rounds differ by."""
        if len(self.old) < 2:
            return 0.0
        even, odd = (statistics.median(self.old[start::2]) for start in (0, 1))
        return max(even, odd) / min(even, odd) - 1

    @property
    def quartiles(self) -> float:
        """OLD's interquartile range over its median."""
        if len(self.old) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.old, n=4, method="inclusive")
        return (high - low) / middle

    @property
    def same(self) -> bool:
        return abs(self.ratio - 1) <= self.spread + TOLERANCE

    def __str__(self) -> str:
        old, new = (1e3 * statistics.median(times) for times in (self.old, self.new))
        spread = f"{self.spread:7.1%} {self.quartiles:7.1%}"
        end = "" if self.same else "  <- slower" if self.ratio > 1 else "  <- faster"
        return f"{self.measure:34} {old:9.1f} {new:9.1f} {self.ratio:8.3f} {spread}{end}"


def compare_speed(names: list[str], editions: tuple[Edition, Edition], rounds: int) -> list[Row]:
    """Print a line for each measure as it is done."""
    rows = []
    header = f"{'median, ms':34} {'OLD':>9} {'NEW':>9} {'NEW/OLD':>8} {'spread':>7} {'IQR':>7}"
    print(header)
    workers = {edition: Worker(edition) for edition in editions}
    try:
        for name in names:
            rows.append(measure_in_turns(name, workers, rounds))
            print(rows[-1], flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    return rows


def measure_in_turns(name: str, workers: dict[Edition, Worker], rounds: int) -> Row:
    """Rounds of both editions, who is first changes; a round before warms up."""

    def seconds(edition: Edition) -> float:
        if name == EPOCH:
            return epoch_seconds(edition)
        if name in IN_PROCESS:
            return workers[edition].measure(name)
        return process_seconds(edition, name)

    warm = max(seconds(edition) for edition in workers)
    count = rounds * SHORT if warm < 1 else rounds
    if name == EPOCH:
        count = max(2, rounds // 3)
    times = {edition: [] for edition in workers}
    for number in range(count):
        order = list(workers) if number % 2 else list(reversed(workers))
        for edition in order:
            times[edition].append(seconds(edition))
    return Row(name, *times.values())


# ------------------------------------------------------------------------------------------------


def machine(threads: int) -> dict[str, object]:
    """What a reader must know of the results."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*:\s*(.+)", text)
    return {
        "processor": name[1].strip() if name else platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def select(names: list[str], wanted: list[str] | None) -> list[str]:
    """The names that begin with a wanted word, all if none is wanted."""
    return [name for name in names if not wanted or any(name.startswith(w) for w in wanted)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD", type=Path, help="a checkout with its .venv")
    parser.add_argument("new", metavar="NEW", type=Path, help="the other one")
    parser.add_argument("--only", choices=("numbers", "speed"), help="one of the two parts")
    text = f"how its name begins: {', '.join((*cases(1, 1), *MEASURES))}; repeatable"
    parser.add_argument("--case", action="append", metavar="NAME", help=text)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of the digits ({EPOCHS})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the detector ({STEPS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each measure ({ROUNDS})")
    parser.add_argument("--threads", type=int, help="numbers: 1, speed: all cores")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args()
    numbers = select(list(cases(1, 1)), args.case) if args.only != "speed" else []
    measures = select(list(MEASURES), args.case) if args.only != "numbers" else []
    if not numbers and not measures:
        parser.error(f"--case {' '.join(args.case)}: there is none of that name")

    with tempfile.TemporaryDirectory(prefix="vil-editions-") as folder:
        written: dict[str, object] = {}
        for part, names in (("numbers", numbers), ("speed", measures)):
            if not names:
                continue
            threads = args.threads or (1 if part == "numbers" else os.cpu_count() or 1)
            editions = []
            for name, path in (("OLD", args.old), ("NEW", args.new)):
                work = Path(folder, part, name)
                work.mkdir(parents=True)
                editions.append(Edition(name, path.resolve(), threads, work))
            about = machine(threads) | {edition.name: edition.check() for edition in editions}
            print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
            if part == "numbers":
                table = cases(args.epochs, args.steps)
                some = {name: table[name] for name in names}
                rows = compare_numbers(some, tuple(editions), Path(folder, part))
            else:
                found = compare_speed(names, tuple(editions), args.rounds)
                properties = ("ratio", "spread", "quartiles", "same")
                rows = [asdict(r) | {name: getattr(r, name) for name in properties} for r in found]
            written[part] = {"machine": about, "rows": rows}
            if args.out:
                args.out.write_text(json.dumps(written, indent=1) + "\n")
            print()
    return int(any(not row["equal"] for row in written.get("numbers", {"rows": []})["rows"]))


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        obey()
    else:
        sys.exit(main())
