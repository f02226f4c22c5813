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
    build.set_up(cfg)
    with torch.device("meta"):
        model = build.build_model(cfg)
    side = cfg.INPUT.IMAGE_SIZE
    macs = model.macs((side, side))
    rows = []
    for number, (stage, spec) in enumerate(zip(model.stages, model.specs), start=1):
        side //= spec.patch
        what = f"{len(spec.attention)} x {spec.attention[0] if spec.attention else '-'}"
        rows.append((f"stage {number}", what, f"{side} x {side} + {spec.num_global}", spec.dim, _count(stage)))
    rows.append(("head", "", "", model.num_features, _count(model.norm) + _count(model.head)))
    print(f"{'':8} {'attention':16} {'tokens':>14} {'width':>6} {'parameters':>12} {'MACs':>15}")
    for (name, what, tokens, width, parameters), count in zip(rows, macs):
        print(f"{name:8} {what:16} {tokens:>14} {width:>6} {parameters:>12,} {count:>15,}")
    print(f"{'total':8} {'':16} {'':14} {'':6} {_count(model):>12,} {sum(macs):>15,}")
    return 0


def _count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
