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

    cfg = resolve(args)
    with torch.device("meta"):
        model = build.build_model(cfg)
    size = (cfg.INPUT.IMAGE_SIZE,) * 2
    rows = []
    stages = zip(model.stages, model.specs, model.grids(size))
    for number, (stage, spec, grid) in enumerate(stages, start=1):
        what = f"{len(spec.attention)} x {spec.attention[0] if spec.attention else '-'}"
        rows.append(
            (
                f"stage {number}",
                what,
                f"{grid[0]} x {grid[1]} + {spec.num_global}",
                spec.dim,
                _count(stage),
            )
        )
    rows.append(("head", "", "", model.num_features, _count(model.norm) + _count(model.head)))
    print(f"{'':8} {'attention':16} {'tokens':>14} {'width':>6} {'parameters':>12} {'MACs':>15}")
    for (name, what, tokens, width, parameters), count in zip(rows, model.macs(size)):
        print(f"{name:8} {what:16} {tokens:>14} {width:>6} {parameters:>12,} {count:>15,}")
    print(f"{'total':8} {'':16} {'':14} {'':6} {_count(model):>12,} {sum(model.macs(size)):>15,}")
    return 0


def _count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
