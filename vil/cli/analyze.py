"""Count parameters and multiply-accumulates (MACs) per stage, for one image of INPUT.IMAGE_SIZE.

vil analyze --config-file imagenet/vil_small.yaml
vil analyze --config-file imagenet/vil_small.yaml INPUT.IMAGE_SIZE 384
vil analyze --config-file coco/mask_rcnn_vil_tiny_1x.yaml INPUT.IMAGE_SIZE 800
"""

import argparse

from vil.cli.arguments import config_arguments, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from vil.workflows.analyze import analyze_cost

    cost = analyze_cost(resolve(args))
    print(f"{'':8} {'attention':16} {'tokens':>14} {'width':>6} {'parameters':>12} {'MACs':>15}")
    for name, attention, tokens, width, parameters, macs in cost.rows:
        print(f"{name:8} {attention:16} {tokens:>14} {width:>6} {parameters:>12,} {macs:>15,}")
    print(f"{'total':8} {'':16} {'':14} {'':6} {cost.parameters:>12,} {cost.macs:>15,}")
    return 0
