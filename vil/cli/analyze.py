"""Count parameters and multiply-accumulates (MACs) per stage, or list memory layout conversions.

vil analyze --config-file imagenet/vil_small.yaml
vil analyze --config-file imagenet/vil_small.yaml INPUT.IMAGE_SIZE 384
vil analyze --config-file coco/mask_rcnn_vil_tiny_1x.yaml INPUT.IMAGE_SIZE 800
vil analyze --config-file imagenet/vil_small.yaml --layout AMP.MEMORY_FORMAT nhwc

MACs are for one image of INPUT.IMAGE_SIZE. --layout runs a training step in the config's precision
and memory format, and lists the copies that change a tensor's memory layout, such as from NCHW to
NHWC. There is a line per module, pass (forward or backward) and operator, with the bytes copied and
the share of the step's time. Copies inside attention backends are not listed.
"""

import argparse

from vil.cli.arguments import at_least, config_arguments, resolve
from vil.utils.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    add = parser.add_argument
    add("--layout", action="store_true", help="list copies that change a tensor's memory layout")
    add("--batch", type=at_least(1), default=4, metavar="B", help="batch size for --layout (4)")


def run(args: argparse.Namespace) -> int:
    from vil.workflows import analyze

    cfg = resolve(args)
    if args.layout:
        print_copies(analyze.find_layout_copies(cfg, args.batch))
        return 0
    if not analyze.counts_cost(cfg):
        raise ConfigError(f"TASK {cfg.TASK} does not count the cost of a model")
    cost = analyze.analyze_cost(cfg)
    print(f"{'':8} {'attention':16} {'tokens':>14} {'width':>6} {'parameters':>12} {'MACs':>15}")
    for name, attention, tokens, width, parameters, macs in cost.rows:
        print(f"{name:8} {attention:16} {tokens:>14} {width:>6} {parameters:>12,} {macs:>15,}")
    print(f"{'total':8} {'':16} {'':14} {'':6} {cost.parameters:>12,} {cost.macs:>15,}")
    return 0


def print_copies(copies: list) -> None:
    """Print a table of the copies that change a tensor's memory layout: one line per module, pass
    and operator, and a line of totals. copies: result of `find_layout_copies`."""
    print(f"{'module':40} {'pass':9} {'operator':9} {'calls':>6} {'MiB':>9} {'of time':>8}")
    for row in copies:
        print(_line(row.module, row.way, row.operator, row.calls, row.bytes, row.share))
    calls, size, share = (sum(row[i] for row in copies) for i in (3, 4, 5))
    print(_line("all", "", "", calls, size, share))


def _line(module: str, way: str, operator: str, calls: int, size: int, share: float) -> str:
    return f"{module:40} {way:9} {operator:9} {calls:6} {size / 2**20:9.2f} {share:8.2%}"
