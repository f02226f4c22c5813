"""Measure a training step of timm vision transformers at 1024 px with three kinds of attention.

  python benchmarks/patch_attention.py       writes benchmarks/results/patch-attention-cpu.json
  python benchmarks/patch_attention.py --rounds 3 --json FILE
  python benchmarks/patch_attention.py --models vit_tiny_patch16_224 --window 7

patched: local attention, by `vil.patch_attention(model, window=8)`.
fused: timm's attention with F.scaled_dot_product_attention.
unfused: timm's attention as softmax(q k) v.

A step has one image with 4,096 patch tokens, in float32, with AdamW, on two threads. Times are
medians of interleaved rounds. Memory is the peak of a step's tensors, without weights, optimizer
state and images.
"""

import argparse
import copy
from dataclasses import replace

import timm
import torch
from shared import CPU, RESULTS, add_json, make_parser, write_json
from torch import nn
from torch.amp import GradScaler

import vil
from vil.utils.machine import machine
from vil.workflows.benchmark_model import Contender, Row, measure

THREADS, ROUNDS, PIXELS, WINDOW = 2, 9, 1024, 8
MODELS = ("vit_tiny_patch16_224", "deit3_small_patch16_224")
WAYS = ("fused", "patched", "unfused")
# upper bounds of the time and memory of a patched training step, divided by those of another kind
BOUNDS = {"time over fused": 0.6, "memory over fused": 1.1, "memory over unfused": 0.25}


def build_models(name: str, pixels: int, window: int) -> dict[str, nn.Module]:
    """Return {way: model} for the WAYS, all with the same weights. name: name of the model in timm.
    pixels: image side. window: chunk side of the patched attention."""
    torch.manual_seed(0)
    fused = timm.create_model(name, img_size=pixels)
    patched, unfused = (copy.deepcopy(fused) for _ in range(2))
    for model, switch in ((fused, True), (unfused, False)):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = switch
    return dict(zip(WAYS, (fused, vil.patch_attention(patched, window=window), unfused)))


def make_contender(model: nn.Module, pixels: int) -> Contender:
    torch.manual_seed(0)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), GradScaler(enabled=False)
    images, targets = torch.randn(1, 3, pixels, pixels), torch.zeros(1, dtype=torch.long)
    return Contender(model, optimizer, scaler, images, targets)


def measure_model(name: str, args: argparse.Namespace) -> dict[str, Row]:
    """Measure a model with each attention. Returns {way: row}."""
    models = build_models(name, args.pixels, args.window)
    entries = [
        (Row(name, way, ""), make_contender(model, args.pixels)) for way, model in models.items()
    ]
    rows = dict(zip(WAYS, measure(entries, args.rounds)))
    for way, row in rows.items():
        assert not row.reason, f"{name}, {way}: {row.reason}"
    return {way: replace(row, attention=way) for way, row in rows.items()}


def compute_ratios(rows: dict[str, Row]) -> dict[str, float]:
    """Return the training time and memory of "patched", divided by those of the other ways, as
    {"time over fused": ratio, ...}."""
    patched, ratios = rows["patched"], {}
    for way in ("fused", "unfused"):
        ratios[f"time over {way}"] = rows[way].training / patched.training
        ratios[f"memory over {way}"] = patched.training_mib / rows[way].training_mib
    return ratios


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    about = machine(CPU)
    print(f"{about['name']}, {THREADS} threads, torch {about['torch']}, timm {timm.__version__}")
    print(f"{args.pixels} px, batch 1, window {args.window}, {args.rounds} rounds")
    ratios, all_rows = {}, []
    for name in args.models:
        rows = measure_model(name, args)
        all_rows += rows.values()
        print(f"\n{name:28} {'s/step':>8} {'MiB':>8}")
        for way, row in rows.items():
            print(f"  {way:26} {1 / row.training:8.2f} {row.training_mib:8.0f}")
        ratios[name] = compute_ratios(rows)
        for text, value in ratios[name].items():
            bound = BOUNDS.get(text)
            wanted = "" if bound is None else f" (wanted <= {bound:g})"
            missed = "  <- missed" if bound is not None and value > bound else ""
            print(f"  patched: {text}: {value:.3f}{wanted}{missed}", flush=True)
    about |= {"timm": timm.__version__, "pixels": args.pixels, "window": args.window}
    write_json(
        args.json, {"machine": about, "ratios": ratios, "rows": [vars(row) for row in all_rows]}
    )


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser, RESULTS / "patch-attention-cpu.json")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed steps ({ROUNDS})")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="timm models")
    parser.add_argument("--pixels", type=int, default=PIXELS, help=f"image side ({PIXELS})")
    parser.add_argument("--window", type=int, default=WINDOW, help=f"chunk side ({WINDOW})")
    run(parser.parse_args())
