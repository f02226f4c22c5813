"""Compute the classes of NASA's whole image of the Earth at once, streamed, and in windows.

  python benchmarks/earth_stream.py --run runs/earth
  python benchmarks/earth_stream.py --run runs/earth --memory 1GiB --tile 1024

The run is one of segmentation/blue_marble_vil_nano.yaml. Each way is a process of its own. Prints
its wall-clock time, its peak memory (resident), and the number of pixels whose class differs from
that of the whole image. Of these, the pixels whose two largest logits differ by less than 1e-4 are
counted too: there, rounding decides. Needs the extra `geo`.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from shared import add_json, make_parser, write_json

import vil
from vil.tasks.segmentation.layouts import earth_folder
from vil.utils.machine import machine
from vil.utils.text_table import align

TIE = 1e-4


def run(words: list[str], file: Path) -> tuple[float, float, np.ndarray]:
    """Run `vil predict`. Returns the seconds, the largest peak memory of a child process so far in
    MiB, and the class numbers in the image that it wrote."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "vil", "predict", *words], check=True)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return seconds, peak, np.asarray(Image.open(file))


def find_ties(source: str, photo: Path) -> np.ndarray:
    """Return the pixels (H, W) of an image whose two largest logits differ by less than TIE."""
    model = vil.load_for_inference(source)
    image = Image.open(photo).convert("RGB")
    (logits,) = model.task.run(model.model, [model.task.preprocess(image)])
    largest = logits.topk(2, dim=0).values
    return (largest[0] - largest[1] < TIE).numpy()


if __name__ == "__main__":
    Image.MAX_IMAGE_PIXELS = None
    parser = make_parser(__doc__)
    parser.add_argument("--run", required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--memory", default="512MiB", help="limit of the streamed way (512MiB)")
    parser.add_argument("--tile", default="1024", help="side of a window in pixels (1024)")
    add_json(parser)
    args = parser.parse_args()
    photo = earth_folder() / "bmng.jpg"
    with tempfile.TemporaryDirectory() as folder:
        place, common = Path(folder), ["--run", args.run, str(photo)]
        drawn = ["SEGMENTATION.TEST.OUTPUTS=[classes]", "--output"]
        streamed = ["--stream", "--memory", args.memory, "--save", f"classes={place / 's.png'}"]
        ways = {  # with growing memory, because a process reports the largest of its children
            "streamed": ([*common, *streamed], place / "s.png"),
            "windows": (
                [*common, "--tile", args.tile, *drawn, str(place / "w")],
                place / "w/bmng-classes.png",
            ),
            "whole": ([*common, *drawn, str(place / "o")], place / "o/bmng-classes.png"),
        }
        results = {name: run(*way) for name, way in ways.items()}
    whole, ties = results["whole"][2], find_ties(args.run, photo)
    rows, report = [["way", "seconds", "memory, MiB", "pixels that differ", "ties of them"]], {}
    for name, (seconds, peak, classes) in results.items():
        differ = classes != whole
        counts = int(differ.sum()), int((differ & ties).sum())
        rows.append([name, f"{seconds:.1f}", f"{peak:.0f}", *map(str, counts)])
        report[name] = dict(seconds=seconds, memory_mb=peak, differ=counts[0], ties=counts[1])
    print(f"{whole.shape[1]} x {whole.shape[0]} pixels, {int(ties.sum())} ties")
    print(align(rows))
    write_json(args.json, {"ways": report, "machine": machine(torch.device("cpu"))})
