"""Parameters and multiply-accumulates of each stage, for one image.

vil analyze --config-file imagenet/vil_small.yaml
vil analyze --config-file imagenet/vil_small.yaml INPUT.IMAGE_SIZE 384
"""

import argparse

from vil.cli.arguments import config_arguments, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from vil import build
    from vil.models.msvit import MsViT

    cfg = resolve(args)
    with torch.device("meta"):
        model = build.build_model(cfg, weights_follow=True)
    size = (cfg.INPUT.IMAGE_SIZE,) * 2
    rows, counts = ours(model, size) if isinstance(model, MsViT) else foreign(model, size)
    print(f"{'':8} {'attention':16} {'tokens':>14} {'width':>6} {'parameters':>12} {'MACs':>15}")
    for (name, what, tokens, width, parameters), count in zip(rows, counts):
        print(f"{name:8} {what:16} {tokens:>14} {width:>6} {parameters:>12,} {count:>15,}")
    print(f"{'total':8} {'':16} {'':14} {'':6} {_count(model):>12,} {sum(counts):>15,}")
    return 0


def ours(model, size: tuple[int, int]) -> tuple[list[tuple], list[int]]:
    """A row (name, attention, tokens, width, parameters) per stage and the head, and their MACs."""
    rows = []
    stages = zip(model.stages, model.specs, model.grids(size))
    for number, (stage, spec, grid) in enumerate(stages, start=1):
        what = f"{len(spec.attention)} x {','.join(dict.fromkeys(spec.attention)) or '-'}"
        tokens = f"{grid[0]} x {grid[1]} + {spec.num_global}"
        rows.append((f"stage {number}", what, tokens, spec.dim, _count(stage)))
    rows.append(("head", "", "", model.num_features, _count(model.norm) + _count(model.head)))
    return rows, model.macs(size)


def foreign(model, size: tuple[int, int]) -> tuple[list[tuple], list[int]]:
    """One row for all of a model that is none of ours, its MACs half of torch's counted FLOPs."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.eval()(torch.empty(1, 3, *size, device="meta"))
    return [("model", "", "", "", _count(model))], [counter.get_total_flops() // 2]


def _count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
