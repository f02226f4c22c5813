"""Draw what a token of a picture attends to, in each head and stage, and what global tokens do.

  vil visualize attention photo.jpg                                    in the small weights we ship
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
srformer, and the normalised products of random features for performer. linformer mixes all tokens
with weights of both signs before it attends, so no token has a weight, and it is refused. They are
computed without mixed precision. docs/visualize.md shows how to read the picture.
"""

import argparse
import io
import math
import os
import re
import sys

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, of_classifier, resolve
from vil.cli.evaluate import loaded_model, of_weights, refuse_random_weights, run_arguments
from vil.cli.output import PICTURES, output_file, written
from vil.cli.predict import class_names, of_shipped_weights
from vil.config import ConfigError
from vil.config.defaults import is_known
from vil.utils.errors import DataError

TEST = r"test:(\d{1,12})"


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
    if is_known(args.image.partition("=")[0]) and not os.path.exists(args.image):
        raise ConfigError(f"{args.image}: IMAGE stands before KEY VALUE pairs")
    path = output_file(args.out, endings=PICTURES)
    of_shipped_weights(args)
    of_weights(args)
    cfg = of_classifier(resolve(args), "only the attention of classifiers is drawn")
    refuse_random_weights(cfg)
    names = class_names(args, cfg.DATA.NUM_CLASSES)
    return visualize(cfg, args, names, path)


def visualize(cfg: CfgNode, args: argparse.Namespace, names: list[str], path) -> int:
    """Read the picture, load the model, compute the rows, draw."""
    import torch

    from vil import build, build_data
    from vil.engine.distributed import DistInfo
    from vil.engine.task import evaluating
    from vil.report.attention_maps import draw_attention

    device = build.set_up(cfg)
    image = build_data.build_eval_transform(cfg)(read(cfg, args.image, device))
    token = token_of(args.token, image.shape[-2:])
    model, report = loaded_model(cfg)
    places = blocks_of(model, args.stage, args.block)
    print(report, file=sys.stderr)
    model = build.place(model, cfg, device, training=False)
    build.select_attention_backends(model, cfg, device, DistInfo(), training=False)
    with evaluating(model):
        batch = image[None].to(device)
        share, number = model(batch).float().softmax(-1)[0].max(-1)
        rows = all_rows(model, batch, places, token, args)
    said = f"{args.image}: class {names[number.item()]}, {share:.1%}"
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (cfg.INPUT.MEAN, cfg.INPUT.STD))
    shown = (image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()
    with written(path):
        draw_attention(shown, rows, said, path)
    print(path)
    return 0


def read(cfg: CfgNode, word: str, device):
    """The picture that IMAGE means. DataError for one that is none."""
    from vil import build_data
    from vil.data.image import UnreadableImage, read_image
    from vil.engine.distributed import DistInfo

    numbered = re.fullmatch(TEST, word) if not os.path.exists(word) else None
    try:
        if not numbered:
            return read_image(io.BytesIO(sys.stdin.buffer.read()) if word == "-" else word)
        name, loader = next(iter(build_data.build_test_loaders(cfg, DistInfo(), device).items()))
        if int(numbered[1]) >= len(loader.dataset):
            raise DataError(f"{word}: {name} has {len(loader.dataset)} pictures, from 0")
        return loader.dataset.image(int(numbered[1]))
    except UnreadableImage as error:
        raise DataError(f"{word} cannot be read: {error}") from error


def token_of(text: str | None, size: tuple[int, int]) -> tuple[int, int]:
    """'40,12' -> the pixel (40, 12); the middle without a text. ConfigError outside the picture."""
    if text is None:
        return size[0] // 2, size[1] // 2
    found = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
    if not found:
        raise ConfigError(f"--token {text}: expected a row and a column in pixels, such as 40,12")
    row, col = int(found[1]), int(found[2])
    if not (row < size[0] and col < size[1]):
        raise ConfigError(f"--token {text}: outside the picture of {size[0]} x {size[1]} pixels")
    return row, col


def blocks_of(model, stage: int | None, block: int | None) -> list[tuple[int, int]]:
    """(stage, block) of each attention to draw, from 0. ConfigError for one that there is not."""
    from vil.models.vision_longformer import MsViT

    if not isinstance(model, MsViT):
        raise ConfigError("MODEL.ARCH is none of our models, so there are no maps of attention")
    depths = [len(each.blocks) for each in model.stages]
    if stage is not None and not 1 <= stage <= len(depths):
        raise ConfigError(f"--stage {stage}: the model has stages 1 to {len(depths)}")
    stages = range(len(depths)) if stage is None else [stage - 1]
    if block is None:
        found = [(number, depths[number] - 1) for number in stages if depths[number]]
        if not found:
            raise ConfigError(f"--stage {stage}: it has no blocks, so no attention")
        return found
    for number in stages:
        if not 1 <= block <= depths[number]:
            has = f"blocks 1 to {depths[number]}" if depths[number] else "no blocks"
            raise ConfigError(f"--block {block}: stage {number + 1} has {has}")
    return [(number, block - 1) for number in stages]


def all_rows(model, batch, places: list[tuple[int, int]], token, args) -> list:
    """The rows of all blocks. An attention without maps is passed over if others have some."""
    rows, refusals = [], []
    for stage, block in places:
        try:
            rows += rows_of(model, batch, stage, block, token, args.only)
        except ValueError as error:
            refusals.append(f"stage {stage + 1}: {error}")
    if not rows:
        raise ConfigError(refusals[0] if refusals else "--only global: there are no global tokens")
    for refusal in refusals:
        print(f"left out: {refusal}", file=sys.stderr)
    return rows


def rows_of(model, batch, stage: int, block: int, token: tuple[int, int], only: str | None) -> list:
    """The rows of one block: the token, then each global token. ValueError for a pixel that no
    token holds, and for an attention without maps."""
    from vil.models.attention_maps import attention_maps
    from vil.report.attention_maps import Row

    num_global, asked = model.specs[stage].num_global, {}
    where = f"stage {stage + 1}, block {block + 1}"
    side = math.prod(each.embed.patch for each in model.stages[: stage + 1])
    if only != "global":
        grid = model.grids(batch.shape[-2:])[stage]
        row, col = place_of(token, side, grid)
        title = f"{where}\ntoken {row},{col} of {grid[0]} x {grid[1]}"
        asked[num_global + row * grid[1] + col] = title, (row * side, col * side, side)
    if only != "token":
        asked |= {n: (f"{where}\nglobal token {n + 1}", None) for n in range(num_global)}
    if not asked:
        return []
    found = attention_maps(model, batch, stage, block, list(asked))
    weights = found.weights[0].cpu().double().numpy()
    facts = dict(num_global=num_global, cells=found.cells, side=side * found.ratio)
    return [
        Row(title, weights[:, n], square=square, **facts)
        for n, (title, square) in enumerate(asked.values())
    ]


def place_of(token: tuple[int, int], side: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Row and column of the token that holds a pixel. ValueError where none does."""
    row, col = token[0] // side, token[1] // side
    if not (row < grid[0] and col < grid[1]):
        raise ValueError(
            f"no token holds pixel {token[0]},{token[1]}: {grid[0]} x {grid[1]} tokens of "
            f"{side} pixels leave the last rows or columns of the picture out"
        )
    return row, col
