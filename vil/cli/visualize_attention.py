"""Draw what a token of a picture attends to, in each head and stage, and what global tokens do.

  vil visualize attention photo.jpg                                    the shipped small weights
  vil visualize attention photo.jpg --run runs/nano                    the token in the middle
  vil visualize attention photo.jpg --run runs/nano --token 40,12 --out seen.png
  vil visualize attention photo.jpg --run runs/nano --stage 2 --block 1 --only token
  vil visualize attention test:17 --run runs/nano                      a picture of its test set
  vil visualize attention photo.jpg --config-file imagenet/vil_small.yaml MODEL.MODEL_PATH best.pth

IMAGE is a file, - for standard input, or test:N, the picture with number N of the first test set.
It is shown as the model sees it, resized and cropped as in evaluation. --token is a row and a
column in pixels of that picture, from 0 at the top left: the ticks of the drawing. In each stage
the token whose patch holds this pixel is asked. Stages and blocks count from 1; without --stage
all stages are drawn, without --block the last block of each.

The weights are those of the model's own attention, exact: softmax over window and global tokens for
longformer, over everything for full, over the global tokens for global, over reduced cells for
srformer, and the normalized products of random features for performer. linformer mixes all tokens
with weights of both signs before it attends, so no token has a weight, and it is refused. They are
computed without mixed precision. docs/guides/visualize.md shows how to read the picture.
"""

import argparse
import os
import sys

from vil.cli.arguments import config_arguments, run_arguments, with_weights
from vil.cli.predict import use_shipped_weights
from vil.config.defaults import is_known
from vil.utils.errors import ConfigError
from vil.utils.output_paths import IMAGE_SUFFIXES, output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("image", metavar="IMAGE", help="a file, - for standard input, or test:N")
    config_arguments(parser)
    run_arguments(parser)
    add("--token", metavar="ROW,COL", help="in pixels of the picture shown (its middle)")
    add("--stage", type=int, metavar="N", help="one stage, from 1 (all)")
    add("--block", type=int, metavar="N", help="the block, from 1 (the last one of each stage)")
    add("--only", choices=["token", "global"], help="leave the other rows out")
    add("--classes", metavar="FILE", help="the names of the classes, one per line")
    add("--out", default="attention.png", metavar="FILE", help="of the picture (attention.png)")


def run(args: argparse.Namespace) -> int:
    from vil.workflows import inference
    from vil.workflows.visualize_attention import visualize_attention

    if is_known(args.image.partition("=")[0]) and not os.path.exists(args.image):
        raise ConfigError(f"{args.image}: IMAGE stands before KEY VALUE pairs")
    path = output_file(args.out, endings=IMAGE_SUFFIXES)
    use_shipped_weights(args)
    cfg, class_names = with_weights(args)
    if args.classes:
        class_names = inference.read_class_file(args.classes, cfg.DATA.NUM_CLASSES)
    stdin = sys.stdin.buffer.read() if args.image == "-" else None
    drawn = visualize_attention(
        cfg,
        args.image,
        path,
        class_names=class_names,
        stdin=stdin,
        token=args.token,
        stage=args.stage,
        block=args.block,
        only=args.only,
    )
    print(drawn.report, file=sys.stderr)
    for refusal in drawn.left_out:
        print(f"left out: {refusal}", file=sys.stderr)
    print(path)
    return 0
