"""Train a detector from a config; `vil train` with a check that it is one.

  vil detect train --config-file scenes/mask_rcnn_vil_nano.yaml --output_dir runs/scenes
  vil detect train --config-file scenes/mask_rcnn_vil_nano.yaml --output_dir runs/scenes --resume
  vil detect train --config-file coco/mask_rcnn_vil_tiny_1x.yaml --data /data/coco \\
      MODEL.MODEL_PATH model_best.pth
  scripts/coco_1x.sh mask_rcnn_vil_tiny model_best.pth /data/coco         on 8 GPUs
  vil detect train --config-file mine.yaml --dry-run     one step on made-up pictures: does it fit?

MODEL.MODEL_PATH: weights of a classifier, ours or the 2021 reference's, or of one of its detectors,
for the backbone; or of a detector of ours, for all of it. All other flags are those of `vil train`.
"""

import argparse

from yacs.config import CfgNode

from vil.cli import train
from vil.config import ConfigError

add_arguments = train.add_arguments


def run(args: argparse.Namespace) -> int:
    return train.begin(args, of_detector(train.asked(args)))


def of_detector(cfg: CfgNode) -> CfgNode:
    """The config, if it is a detector's; else a ConfigError."""
    if not cfg.DETECTION.MODEL:
        raise ConfigError(
            "this config is a classifier's: set DETECTION.MODEL, or take one of configs/coco or "
            "configs/scenes"
        )
    return cfg
