"""Measure a training step of timm vision transformers with full and with local attention.

  python benchmarks/patch_attention.py       writes benchmarks/results/patch-attention-cpu.json
  python benchmarks/patch_attention.py --pixels 518 1036 --rounds 3 --json FILE
  python benchmarks/patch_attention.py --models vit_tiny_patch16_224 --pixels 1024 --window 7

fused: timm's attention with F.scaled_dot_product_attention.
patched: local attention, by `vil.patch_attention(model, window=8)`.

A step has one image, in float32, with AdamW, on two threads. Times are medians of interleaved
rounds, of which large images have fewer. Memory is the peak of a step's tensors, without weights,
optimizer state and images.
"""

import argparse
import copy

import timm
import torch
from shared import CPU, RESULTS, add_json, make_parser, write_json
from torch import nn
from torch.amp import GradScaler

import vil
from vil.utils.machine import machine
from vil.workflows.benchmark_model import Contender, Row, measure

THREADS, WINDOW = 2, 8
MODELS = ("vit_small_patch14_dinov2",)
ROUNDS = {518: 9, 1036: 5, 2072: 1}  # {image side: timed steps}
BOUNDS = {1036: 0.5, 2072: 0.2}  # {image side: largest time of a patched step over a fused one}


def build_models(name: str, pixels: int, window: int) -> dict[str, nn.Module]:
    """Return {"fused": model, "patched": model}, both with the same random weights.

    name: name of the model in timm. pixels: image side. window: chunk side of the patched model.
    """
    torch.manual_seed(0)
    fused = timm.create_model(name, img_size=pixels, num_classes=10)
    for module in fused.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
    patched = vil.patch_attention(copy.deepcopy(fused), window=window)
    return {"fused": fused, "patched": patched}


def make_contender(model: nn.Module, pixels: int) -> Contender:
    torch.manual_seed(0)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), GradScaler(enabled=False)
    images, targets = torch.randn(1, 3, pixels, pixels), torch.zeros(1, dtype=torch.long)
    return Contender(model, optimizer, scaler, images, targets)


def measure_model(name: str, pixels: int, window: int, rounds: int) -> dict[str, Row]:
    """Measure a model with both kinds of attention. Returns {"fused": row, "patched": row}."""
    models = build_models(name, pixels, window)
    entries = [(Row(name, way, way), make_contender(m, pixels)) for way, m in models.items()]
    rows = dict(zip(models, measure(entries, rounds)))
    for way, row in rows.items():
        assert not row.reason, f"{name}, {way}: {row.reason}"
    return rows


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    about = machine(CPU) | {"timm": timm.__version__, "window": args.window}
    print(f"{about['name']}, {THREADS} threads, torch {about['torch']}, timm {timm.__version__}")
    found = []
    for name in args.models:
        for pixels in args.pixels:
            rounds = args.rounds or ROUNDS.get(pixels, max(ROUNDS.values()))
            rows = measure_model(name, pixels, args.window, rounds)
            print(f"\n{name}, {pixels} px, window {args.window}, rounds: {rounds}")
            for way, row in rows.items():
                seconds, mib = 1 / row.training, row.training_mib
                print(f"  {way:8} {seconds:8.2f} s/step {mib:8.0f} MiB")
                entry = dict(model=name, pixels=pixels, way=way, rounds=rounds)
                found.append(entry | dict(seconds=round(seconds, 4), mib=round(mib, 1)))
            ratio, bound = rows["fused"].training / rows["patched"].training, BOUNDS.get(pixels)
            wanted = "" if bound is None else f" (wanted <= {bound:g})"
            missed = "  <- missed" if bound is not None and ratio > bound else ""
            print(f"  time of patched over fused: {ratio:.3f}{wanted}{missed}", flush=True)
    write_json(args.json, {"machine": about, "rows": found})


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser, RESULTS / "patch-attention-cpu.json")
    parser.add_argument("--rounds", type=int, help="timed steps (fewer for large images)")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="timm models")
    sizes = ", ".join(map(str, ROUNDS))
    parser.add_argument(
        "--pixels", type=int, nargs="+", default=list(ROUNDS), help=f"image sides ({sizes})"
    )
    parser.add_argument("--window", type=int, default=WINDOW, help=f"chunk side ({WINDOW})")
    run(parser.parse_args())
