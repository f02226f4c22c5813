"""Draw what a token of an image, and each global token, attends to in every head and stage.

  vil visualize attention photo.jpg                                    the shipped small weights
  vil visualize attention photo.jpg --run runs/nano                    the token in the middle
  vil visualize attention photo.jpg --run runs/nano --token 40,12 --out seen.png
  vil visualize attention photo.jpg --run runs/nano --stage 2 --block 1 --only token
  vil visualize attention test:17 --run runs/nano                      an image of its test set
  vil visualize attention photo.jpg --config-file imagenet/vil_small.yaml MODEL.MODEL_PATH best.pth

IMAGE is a file, - for standard input, or test:N for image N of the first test set. The plot shows
the image as the model sees it, resized and cropped as in evaluation. --token is the row and column
of a pixel in this image, counted from 0 at the top left, as on the axes of the plot. It selects the
token whose patch contains the pixel. Stages and blocks count from 1. By default, the last block of
each stage is drawn.

The plot shows the model's exact attention weights, computed without mixed precision. For these
attention types, they are a softmax over the listed keys:
  longformer  the window and the global tokens
  pattern     the keys of the pattern and the global tokens
  full        all tokens
  global      the global tokens
  srformer    the global tokens, and square groups of tokens that are each reduced to one key
The weights of performer are normalized products of random features. linformer cannot be drawn: its
keys are projections of all tokens with weights of both signs, so it has no attention weights of
single tokens. docs/guides/predict.md explains the plot.
"""

import argparse
import os
import sys

from vil.cli.arguments import (
    classes_argument,
    config_arguments,
    files_read,
    run_arguments,
    with_weights,
)
from vil.cli.predict import use_shipped_weights
from vil.config.key_lookup import is_known
from vil.utils.errors import ConfigError
from vil.utils.output_paths import IMAGE_SUFFIXES, output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("image", metavar="IMAGE", help="image file, - for standard input, or test:N")
    config_arguments(parser)
    run_arguments(parser)
    classes_argument(parser)
    add("--token", metavar="ROW,COL", help="row and column of a pixel (default: the center)")
    add("--stage", type=int, metavar="N", help="number of the stage, from 1 (default: all)")
    add("--block", type=int, metavar="N", help="number of the block, from 1 (default: the last)")
    add(
        "--only",
        choices=["token", "global"],
        help="draw only the selected token or the global tokens",
    )
    add("--out", default="attention.png", metavar="FILE", help="plot to write (attention.png)")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.visualize import Selection, visualize_attention

    if is_known(args.image.partition("=")[0]) and not os.path.exists(args.image):
        raise ConfigError(f"{args.image}: expected IMAGE before the KEY VALUE pairs")
    path = output_file(args.out, "--out", IMAGE_SUFFIXES, files_read(args, "out"))
    use_shipped_weights(args)
    cfg, class_names = with_weights(args)
    stdin = sys.stdin.buffer.read() if args.image == "-" else None
    selection = Selection(token=args.token, stage=args.stage, block=args.block, only=args.only)
    report, left_out = visualize_attention(
        cfg, args.image, path, selection, class_names=class_names, stdin=stdin
    )
    print(report, file=sys.stderr)
    for refusal in left_out:
        print(f"left out: {refusal}", file=sys.stderr)
    print(path)
    return 0
