"""Draw what a token of an image attends to in each head and stage, and what a window shows it."""

import io
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from yacs.config import CfgNode

from vil.data.image import UnreadableImage, read_image
from vil.engine.distributed import DistInfo
from vil.engine.evaluation import evaluating
from vil.models.attention_maps import attention_maps
from vil.models.vision_longformer import MsViT
from vil.ops import Window
from vil.ops.reference import attended_keys
from vil.ops.window import Mask
from vil.report.attention_maps import Row, draw_attention
from vil.report.pattern import draw_patterns, seen_from
from vil.tasks import refuse_without
from vil.tasks.base import Task
from vil.utils.errors import ConfigError, DataError
from vil.utils.output_paths import refuse_failed_writes
from vil.workflows.inference import load_model

TEST = r"test:(\d{1,12})"
MOST = 1024  # tokens along a side: beyond, a token is smaller than a pixel
WIDEST = 256  # the side of a chunk: its pairs are walked one by one


class Selection(NamedTuple):
    """What to draw. token: "row,col" in pixels of the image as the model sees it, by default its
    middle. stage, block: from 1, by default all stages and the last block of each. only: "token" or
    "global"."""

    token: str | None = None
    stage: int | None = None
    block: int | None = None
    only: str | None = None


def visualize_attention(
    cfg: CfgNode,
    image: str,
    out: Path,
    selection: Selection = Selection(),  # noqa: B008
    *,
    class_names: Sequence[str] = (),
    stdin: bytes | None = None,
) -> tuple[str, list[str]]:
    """Draw to `out`; return which weights were loaded, and why a stage is left out.

    image: a file, "test:N", or anything with its content as `stdin`.
    """
    refuse_without(cfg, "visualize attention")
    inference = load_model(cfg, class_names)
    task = inference.task
    original = _read(task, image, stdin)
    tensor = inference.transform(original)
    size = tuple(tensor.shape[-2:])
    pixel = (size[0] // 2, size[1] // 2)
    if selection.token:
        pixel = parse_token(selection.token, size, "pixels")
    rows, left_out = [], []
    with evaluating(inference.model) as model:
        batch = tensor[None].to(task.device)
        probability, number = model(batch).float().softmax(-1)[0].max(-1)
        for stage, block in blocks_of(model, selection):
            try:
                rows += rows_of(model, batch, stage, block, pixel, selection.only)
            except ValueError as error:
                left_out.append(f"stage {stage + 1}: {error}")
    if not rows:
        raise ConfigError(left_out[0] if left_out else "--only global: there are no global tokens")
    title = f"{image}: class {inference.classes[number.item()]}, {probability:.1%}"
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (cfg.INPUT.MEAN, cfg.INPUT.STD))
    shown = (tensor * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()
    with refuse_failed_writes(out):
        draw_attention(shown, rows, title, out)
    return inference.report, left_out


def _read(task: Task, word: str, stdin: bytes | None) -> Image.Image:
    """The image that a word means. Raises DataError for one that cannot be read."""
    numbered = re.fullmatch(TEST, word) if not os.path.exists(word) else None
    try:
        if not numbered:
            return read_image(word if stdin is None else io.BytesIO(stdin))
        name, loader = next(iter(task.test_loaders(DistInfo()).items()))
        if int(numbered[1]) >= len(loader.dataset):
            raise DataError(f"{word}: {name} has {len(loader.dataset)} images, from 0")
        return loader.dataset.image(int(numbered[1]))
    except UnreadableImage as error:
        raise DataError(f"{word} cannot be read: {error}") from error


def blocks_of(model: nn.Module, selection: Selection) -> list[tuple[int, int]]:
    """(stage, block) of each attention to draw, from 0. ConfigError for one that there is not."""
    if not isinstance(model, MsViT):
        raise ConfigError("MODEL.ARCH is an external model, whose attention cannot be drawn")
    depths = [len(each.blocks) for each in model.stages]
    stage, block = selection.stage, selection.block
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


def rows_of(
    model: MsViT, batch: Tensor, stage: int, block: int, pixel: tuple[int, int], only: str | None
) -> list[Row]:
    """The rows of one block: the token, then each global token. ValueError for a pixel that no
    token holds, and for an attention without maps."""
    num_global, asked = model.specs[stage].num_global, {}
    where = f"stage {stage + 1}, block {block + 1}"
    side = math.prod(each.embed.patch for each in model.stages[: stage + 1])
    if only != "global":
        (x, y), row, col = model.grids(batch.shape[-2:])[stage], pixel[0] // side, pixel[1] // side
        if not (row < x and col < y):
            raise ValueError(
                f"no token holds pixel {pixel[0]},{pixel[1]}: {x} x {y} tokens of {side} pixels "
                "leave the last rows or columns of the picture out"
            )
        title = f"{where}\ntoken {row},{col} of {x} x {y}"
        asked[num_global + row * y + col] = title, (row * side, col * side, side)
    if only != "token":
        asked |= {n: (f"{where}\nglobal token {n + 1}", None) for n in range(num_global)}
    if not asked:
        return []
    found = attention_maps(model, batch, stage, block, list(asked))
    weights = found.weights[0].cpu().double().numpy()
    return [
        Row(title, weights[:, n], num_global, found.cells, side * found.ratio, square)
        for n, (title, square) in enumerate(asked.values())
    ]


def visualize_pattern(
    grid: str,
    window: int,
    out: Path,
    *,
    masks: Sequence[int] = (0,),
    modes: Sequence[int] = (0,),
    tokens: Sequence[str] = (),
) -> None:
    """Draw a panel per mask, mode and token ("row,col"; the middle one by default) to `out`.

    grid: "12x17" or "14". window: the side of a chunk. Lists have one item, or as many as the
    longest.
    """
    size = grid_of(grid)
    tokens = list(tokens) or [f"{size[0] // 2},{size[1] // 2}"]
    lists = dict(zip(("--sw-exact", "--mode", "--token"), (list(masks), list(modes), tokens)))
    panels = [panel(size, window, *row) for row in zip(*paired(lists))]
    with refuse_failed_writes(out):
        draw_patterns(panels, out)


def grid_of(text: str) -> tuple[int, int]:
    """'12x17' -> (12, 17), '14' -> (14, 14)."""
    found = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text)
    if not found:
        raise ConfigError(f"--grid {text}: expected rows and columns, such as 12x17 or 14")
    grid = int(found[1]), int(found[2] or found[1])
    if not 1 <= min(grid) <= max(grid) <= MOST:
        raise ConfigError(f"--grid {text}: expected 1 to {MOST} tokens along a side")
    return grid


def parse_token(text: str, size: tuple[int, int], unit: str) -> tuple[int, int]:
    """'3,4' -> (3, 4), inside of `size` tokens or pixels. Raises ConfigError for anything else."""
    found = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
    if not found:
        raise ConfigError(f"--token {text}: expected a row and a column from 0, such as 3,4")
    row, col = int(found[1]), int(found[2])
    if not (row < size[0] and col < size[1]):
        raise ConfigError(f"--token {text}: outside of {size[0]} x {size[1]} {unit}")
    return row, col


def paired(lists: dict[str, list]) -> list[list]:
    """The lists, those of one item as long as the longest."""
    most = max(map(len, lists.values()))
    for flag, items in lists.items():
        if len(items) not in (1, most):
            raise ConfigError(f"{flag} has {len(items)} items: expected 1 or, as others, {most}")
    return [items * most if len(items) == 1 else items for items in lists.values()]


def panel(grid: tuple[int, int], size: int, exact: int, mode: int, token: str) -> tuple:
    """Title, picture and chunk side of what one token sees."""
    place = parse_token(token, grid, "tokens")
    if size > WIDEST:
        raise ConfigError(f"--window {size}: expected at most {WIDEST}")
    try:
        window = Window.from_mode(grid, size, exact, mode)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    met = [(row, col) for row, col, _ in attended_keys(window, *place)]
    title = f"SW_EXACT {exact} ({Mask(exact).name.lower()}), MODE {mode}"
    seen = f"{len(set(met))} of {grid[0] * grid[1]} tokens, and the global ones"
    return f"{title}\n{seen}", seen_from(met, grid, place), size
