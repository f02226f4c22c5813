"""Train a model from a config, or resume a run.

vil train --config-file digits/vil_nano.yaml --output_dir runs/nano
vil train --config-file digits/vil_nano.yaml --output_dir runs/nano --resume
vil train --config-file mine.yaml --data /data/flowers OPTIM.LR 5e-4 OPTIM.EPOCHS 100
vil train --config-file scenes/mask_rcnn_vil_nano.yaml --output_dir runs/scenes      a detector
torchrun --nproc_per_node=8 tools/train.py --config-file imagenet/vil_small_rpb.yaml --data DIR
vil train --config-file mine.yaml --preset finetune MODEL.MODEL_PATH runs/nano    keys for a purpose
vil train --config-file mine.yaml --dry-run     one step on synthetic data, to check the config

MODEL.MODEL_PATH is a file with weights to start from. For a detector, it may also hold the weights
of a classifier, of vil or of the 2021 reference, or of a detector of the 2021 reference. These are
loaded into the backbone.
"""

import argparse
import os
from pathlib import Path

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, preset_argument, resolve_with_sources
from vil.config import describe_preset, dump
from vil.utils.errors import INTERRUPTED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    preset_argument(parser)
    text = "continue from the newest checkpoint in the folder, if any; by default with its config"
    parser.add_argument("--resume", action="store_true", help=text)
    text = "build everything, run one step on synthetic data, print its memory and the config"
    parser.add_argument("--dry-run", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    if args.resume and args.output_dir and not args.config_file:
        saved = Path(args.output_dir, "config.yaml")
        args.config_file = str(saved) if saved.is_file() else None
    cfg, sources = resolve_with_sources(args)
    if args.preset and os.environ.get("RANK", "0") == "0":
        print("\n".join(describe_preset(args.preset, cfg, sources)))
    if args.dry_run:
        return print_dry_run(cfg)
    if cfg.EVALUATE:  # as the 2021 code had it
        from vil.cli.evaluate import evaluate

        return evaluate(cfg)
    from vil.workflows.train import train_config

    result = train_config(cfg, resume=args.resume)
    return INTERRUPTED if result.status == "interrupted" else 0


def print_dry_run(cfg: CfgNode) -> int:
    """Run one training step on synthetic data, and print the config and the peak memory. Returns
    the exit code."""
    from vil.workflows.dry_run import dry_run

    num_images, peak = dry_run(cfg)
    if os.environ.get("RANK", "0") == "0":
        print(dump(cfg))
        print(f"dry run: one step of {num_images} synthetic images took {peak:.0f} MB at its peak")
    return 0
