"""Measure Mask R-CNN: training steps with three backbones, and prediction on a large image.

  python benchmarks/detection.py     writes benchmarks/results/detection-cpu.json
  python benchmarks/detection.py --rounds 3 --side 4096 --json FILE

Training: mask_rcnn_vil_tiny is the config of vil. swin_tiny is timm's backbone with the same
feature pyramid and heads. maskrcnn_resnet50_fpn_v2 is torchvision's. A step has one image of
800 x 1216 pixels with ten objects, in float32, with SGD. Times are medians of interleaved rounds.
Memory is the peak of a step's tensors, without weights and images.

Prediction: `vil predict` on noise of 4096 x 4096 pixels, on the full image and in tiles.
Each run has its own process, whose time and peak resident memory are measured.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from shared import CPU, MIB, RESULTS, add_json, make_parser, time_in_turns, write_json
from torch import Tensor, nn
from torchvision.models.detection import maskrcnn_resnet50_fpn_v2

import vil
from vil.config import get_config
from vil.engine.distributed import DistInfo
from vil.tasks.cost import num_params
from vil.tasks.detection.models.detectors import DetectorConfig, build_detector
from vil.utils.machine import machine
from vil.utils.timing import peak_tensor_bytes
from vil.workflows.attention_backend import select_attention_backends
from vil.workflows.execution import execution_of

THREADS, ROUNDS, SIDE = 2, 5, 4096
CONFIG = "coco/mask_rcnn_vil_tiny_1x.yaml"
SIZE = (800, 1216)
OBJECTS = 10
MOST_BYTES = 8 * 2**30  # upper bound on the resident memory of a prediction
TILES = {"whole": (), "tiles of 1024": ("--tile", "1024", "--overlap", "128")}


class TimmBody(nn.Module):
    """The stages of a timm backbone, with the interface that vil's feature pyramid needs. Unlike
    vil's models, it attends to padding."""

    def __init__(self, name: str, size: tuple[int, int]) -> None:
        super().__init__()
        self.net = timm.create_model(name, features_only=True, img_size=size)
        self.channels = self.net.feature_info.channels()
        self.strides = self.net.feature_info.reduction()

    def forward_intermediates(
        self, x: Tensor, *, intermediates_only: bool = True, valid: Tensor | None = None
    ) -> list[Tensor]:
        return [level.permute(0, 3, 1, 2) for level in self.net(x)]


def ours() -> nn.Module:
    cfg = get_config(CONFIG, ["DEVICE=cpu"])
    model = vil.build_model(cfg)
    select_attention_backends(model, execution_of(cfg, CPU), DistInfo(), training=True)
    return model


def detectors() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    swin = TimmBody("swin_tiny_patch4_window7_224", SIZE)
    return {
        "mask_rcnn_vil_tiny": ours(),
        "swin_tiny, the same heads": build_detector("mask_rcnn", swin, DetectorConfig(80)),
        "maskrcnn_resnet50_fpn_v2": maskrcnn_resnet50_fpn_v2(
            weights_backbone=None, num_classes=81, _skip_resize=True
        ),
    }


def example() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Generate noise with ten boxes of all sizes and masks that fill them."""
    torch.manual_seed(1)
    height, width = SIZE
    sides = torch.logspace(1.3, 2.7, OBJECTS)
    corners = torch.rand(OBJECTS, 2) * (torch.tensor([width, height]) - sides[:, None])
    boxes = torch.cat([corners, corners + sides[:, None]], dim=1)
    masks = torch.zeros(OBJECTS, height, width, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.long().tolist()):
        mask[y0:y1, x0:x1] = 1
    labels = torch.arange(1, OBJECTS + 1)
    return [torch.rand(3, height, width)], [{"boxes": boxes, "labels": labels, "masks": masks}]


def steps(rounds: int) -> dict[str, dict[str, float]]:
    """Measure a training step of each detector. Returns {detector: {"seconds": median time, "MiB":
    peak memory, "parameters": number}}."""
    images, targets = example()
    models = {name: model.train() for name, model in detectors().items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-4) for name, model in models.items()}

    def step(name: str) -> None:
        optimizers[name].zero_grad()
        torch.manual_seed(2)
        sum(models[name](images, targets).values()).backward()
        optimizers[name].step()

    calls, found = {name: partial(step, name) for name in models}, {}
    for name, call in calls.items():
        call()  # allocate gradients
        parameters = num_params(models[name])
        found[name] = {"MiB": peak_tensor_bytes(call, CPU) / MIB, "parameters": parameters}
    for name, times in time_in_turns(calls, rounds, CPU).items():
        found[name]["seconds"] = statistics.median(times)
    return found


def large(side: int) -> dict[str, dict[str, float]]:
    """Measure `vil predict` on an image of `side` x `side` pixels. Returns {way: {"seconds":
    time, "GiB": peak resident memory}} for the ways in TILES."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        image, weights = Path(folder, "large.png"), Path(folder, "vil_tiny.safetensors")
        noise = np.random.RandomState(0).randint(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(noise).save(image, compress_level=1)
        save_file({k: v.contiguous() for k, v in ours().state_dict().items()}, weights)
        for way, words in TILES.items():
            options = [
                f"MODEL.MODEL_PATH={weights}", "DEVICE=cpu", "AMP.ENABLED=False",
                f"DETECTION.INPUT.TEST_SIZE={1024 if words else side}",
                f"DETECTION.INPUT.MAX_SIZE={1024 if words else side}",
                f"INPUT.IMAGE_SIZE={1024 if words else side}",
            ]  # fmt: skip
            line = [
                sys.executable, "-c", REPORTING, "predict", str(image),
                "--config-file", CONFIG, "--score", "0.5", *words, *options,
            ]  # fmt: skip
            done = subprocess.run(line, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            spent, peak = re.search(r"(\S+) s (\d+) KiB", done.stderr).groups()
            found[way] = {"seconds": float(spent), "GiB": int(peak) / 2**20}
    return found


# reads VmHWM, because ru_maxrss includes pages of the parent process from before exec
REPORTING = """
import re, sys, time
from vil.cli import main
began = time.perf_counter()
code = main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(f"{time.perf_counter() - began:.1f} s {peak} KiB", file=sys.stderr)
sys.exit(code)
"""


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    about = machine(CPU)
    print(f"{about['name']}, {THREADS} threads, torch {about['torch']}, timm {timm.__version__}")
    found = steps(args.rounds)
    print(f"\na training step at {SIZE[0]} x {SIZE[1]}, batch 1")
    for name, row in found.items():
        print(
            f"  {name:28} {row['parameters'] / 1e6:6.2f}M {row['seconds']:7.2f} s "
            f"{row['MiB']:7.0f} MiB"
        )
    ratio = found["mask_rcnn_vil_tiny"]["MiB"] / found["swin_tiny, the same heads"]["MiB"]
    print(f"  memory of vil_tiny over swin_tiny: {ratio:.2f} (wanted <= 1)", flush=True)
    images = large(args.side)
    print(f"\nvil predict on an image of {args.side} x {args.side}")
    for way, row in images.items():
        missed = "  <- missed" if row["GiB"] * 2**30 > MOST_BYTES else ""
        print(f"  {way:28} {row['seconds']:7.1f} s {row['GiB']:7.2f} GiB (wanted <= 8){missed}")
    facts = {"timm": timm.__version__, "command": "python benchmarks/detection.py"}
    written = {"machine": about | facts, "steps": found, "large": images}
    write_json(args.json, written)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed steps ({ROUNDS})")
    parser.add_argument("--side", type=int, default=SIDE, help=f"side of the large image ({SIDE})")
    add_json(parser, RESULTS / "detection-cpu.json")
    run(parser.parse_args())
