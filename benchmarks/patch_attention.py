"""A training step of a timm vision transformer at 1024 px: patched, fused and unfused, in turns.

  python benchmarks/patch_attention.py       and writes benchmarks/results/patch-attention-cpu.json
  python benchmarks/patch_attention.py --rounds 3 --json FILE
  python benchmarks/patch_attention.py --models vit_tiny_patch16_224 --window 7

patched is `vil.patch_attention(model, window=8)`; fused is timm's attention by
F.scaled_dot_product_attention, unfused is timm's own softmax(q k) v. Two threads, one image, 4,096
patch tokens, float32, AdamW; medians of the rounds. Memory is what a step holds in tensors at its
peak, beyond weights, momenta and images.
"""

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path

import timm
import torch
from torch import nn
from torch.amp import GradScaler

import vil
from vil.bench.model import Contender, Row, measure, plain
from vil.utils.machine import machine

CPU = torch.device("cpu")
THREADS, ROUNDS, PIXELS, WINDOW = 2, 9, 1024, 8
MODELS = ("vit_tiny_patch16_224", "deit3_small_patch16_224")
RESULT = Path(__file__).parent / "results/patch-attention-cpu.json"
WAYS = ("fused", "patched", "unfused")
# of patched: the time and the memory of a training step over another's, at most
BOUNDS = {("fused", "time"): 0.6, ("fused", "memory"): 1.1, ("unfused", "memory"): 0.25}


def ways(name: str, pixels: int, window: int) -> dict[str, nn.Module]:
    """The same weights with each attention."""
    torch.manual_seed(0)
    fused = timm.create_model(name, img_size=pixels)
    patched, unfused = (copy.deepcopy(fused) for _ in range(2))
    for model, switch in ((fused, True), (unfused, False)):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = switch
    return dict(zip(WAYS, (fused, vil.patch_attention(patched, window=window), unfused)))


def contender(model: nn.Module, pixels: int) -> Contender:
    torch.manual_seed(0)
    return Contender(
        model,
        torch.optim.AdamW(model.parameters()),
        GradScaler(enabled=False),
        torch.randn(1, 3, pixels, pixels),
        torch.zeros(1, dtype=torch.long),
        None,
        lambda: None,
    )


def measured(name: str, args: argparse.Namespace) -> dict[str, Row]:
    """{way: its figures}."""
    entries = [
        (Row(name, way, ""), contender(model, args.pixels))
        for way, model in ways(name, args.pixels, args.window).items()
    ]
    rows = dict(zip(WAYS, measure(entries, args.rounds)))
    for way, row in rows.items():
        assert not row.reason, f"{name}, {way}: {row.reason}"
    return {way: replace(row, attention=way) for way, row in rows.items()}


def ratios(rows: dict[str, Row]) -> dict[str, float]:
    """{"time over fused": ...}: patched over the others, in training."""
    ours = rows["patched"]
    return {
        f"{what} over {way}": (
            rows[way].training / ours.training
            if what == "time"
            else ours.training_mib / rows[way].training_mib
        )
        for way in ("fused", "unfused")
        for what in ("time", "memory")
    }


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    about = machine(CPU)
    print(f"{about['name']}, {THREADS} threads, torch {about['torch']}, timm {timm.__version__}")
    print(f"{args.pixels} px, batch 1, window {args.window}, {args.rounds} rounds")
    found, all_rows = {}, []
    for name in args.models:
        rows = measured(name, args)
        all_rows += rows.values()
        print(f"\n{name:28} {'s/step':>8} {'MiB':>8}")
        for way, row in rows.items():
            print(f"  {way:26} {1 / row.training:8.2f} {row.training_mib:8.0f}")
        found[name] = ratios(rows)
        for text, value in found[name].items():
            most = BOUNDS.get(tuple(reversed(text.split(" over "))))
            wanted = "" if most is None else f" (wanted <= {most:g})"
            missed = "  <- missed" if most is not None and value > most else ""
            print(f"  patched: {text}: {value:.3f}{wanted}{missed}", flush=True)
    facts = {"timm": timm.__version__, "pixels": args.pixels, "window": args.window}
    written = {"machine": about | facts, "ratios": found, "rows": plain(all_rows)}
    args.json.write_text(json.dumps(written, indent=1) + "\n")
    print(f"\n{args.json}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed steps ({ROUNDS})")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="of timm's")
    parser.add_argument("--pixels", type=int, default=PIXELS, help=f"image side ({PIXELS})")
    parser.add_argument("--window", type=int, default=WINDOW, help=f"chunk side ({WINDOW})")
    parser.add_argument("--json", metavar="FILE", type=Path, default=RESULT, help="the result")
    run(parser.parse_args())
