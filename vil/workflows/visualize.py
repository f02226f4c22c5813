"""Draw a model's attention maps for an image, and the attention patterns of local attention."""

import io
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from torch import nn
from yacs.config import CfgNode

from vil.config import override
from vil.data.bands import BandImage
from vil.data.build import read_options
from vil.data.image import UnreadableImage, read_image
from vil.engine.evaluation import evaluating
from vil.models.attention_maps import attention_maps
from vil.models.vision_longformer import MsViT
from vil.ops import Layout, Window
from vil.ops.patterns import parse_pattern
from vil.ops.reference import attended_keys, keys_of_pattern
from vil.ops.window import Mask
from vil.report.attention_maps import Row, draw_attention
from vil.report.pattern import draw_patterns, seen_from
from vil.tasks import refuse_without
from vil.tasks.base import AttentionInput, Task
from vil.utils.errors import ConfigError, DataError
from vil.utils.output_paths import replacing
from vil.workflows.inference import load_model, open_test_sets

TEST = r"test:(\d{1,12})"
MOST = 1024  # tokens along a side of a drawn grid: with more, a token is smaller than a pixel
WIDEST = 256  # largest side of a chunk, because a Python loop visits each key


class Selection(NamedTuple):
    """Selection of the attention maps to draw.

    token: "row,col" of a pixel in the transformed image, by default the center. The token that
    covers this pixel is the query.
    stage: number of a stage, counted from 1; None for all stages.
    block: number of a block in the stage, counted from 1; None for the last block.
    only: "token" for only the maps of this query, "global" for only those of the global tokens;
    None for both.
    """

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
    """Draw attention maps for an image to the file `out`.

    image: a file, or "test:N" for image N of the first test set.
    stdin: content of an image file, to read instead of the file `image`; None to read `image`. The
    title shows `image` in both cases.

    Returns (report, left_out). report: which weights were loaded. left_out: for each stage whose
    maps cannot be drawn, a line with the reason.
    """
    why = "its attention cannot be drawn, because its task has no method attention_input"
    refuse_without(cfg.TASK, "attention_input", why)
    inference = load_model(override(cfg, ["EVAL.FAST=False"]), class_names)
    task = inference.task
    try:
        if numbered := None if os.path.exists(image) else re.fullmatch(TEST, image):
            original = _read_test_image(task, int(numbered[1]))
        else:
            source = image if stdin is None else io.BytesIO(stdin)
            original = read_image(source, **read_options(cfg))
    except UnreadableImage as error:
        raise DataError(f"{image} cannot be read: {error}") from error
    rows, left_out = [], []
    with evaluating(inference.model) as model:
        shown = task.attention_input(model, original)
        size = shown.image.shape[:2]
        pixel = (size[0] // 2, size[1] // 2)
        if selection.token:
            pixel = parse_token(selection.token, size, "pixels")
        for stage, block in blocks_of(shown.network, selection):
            try:
                rows += rows_of(shown, stage, block, pixel, selection.only)
            except ValueError as error:
                left_out.append(f"stage {stage + 1}: {error}")
    if not rows:
        raise ConfigError(left_out[0] if left_out else "--only global: there are no global tokens")
    title = f"{image}: {shown.caption}" if shown.caption else image
    with replacing(out) as aside:
        draw_attention(shown.image, rows, title, aside)
    return inference.report, left_out


def _read_test_image(task: Task, index: int) -> Image.Image | BandImage:
    """Read an image of the first test set. Raises DataError if the set has too few images."""
    name, dataset = next(iter(open_test_sets(task).items()))
    if index >= len(dataset):
        raise DataError(f"test:{index}: the set {name} has images 0 to {len(dataset) - 1}")
    return dataset.image(index)


def blocks_of(model: nn.Module, selection: Selection) -> list[tuple[int, int]]:
    """Return the indices (stage, block), counted from 0, of the blocks whose attention is drawn.
    Raises ConfigError if a selected stage or block does not exist."""
    if not isinstance(model, MsViT):
        raise ConfigError("attention can be drawn only for MODEL.ARCH msvit, not for other models")
    depths = [len(each.blocks) for each in model.stages]
    stage, block = selection.stage, selection.block
    if stage is not None and not 1 <= stage <= len(depths):
        raise ConfigError(f"--stage {stage}: the model has stages 1 to {len(depths)}")
    stages = range(len(depths)) if stage is None else [stage - 1]
    if block is None:
        found = [(number, depths[number] - 1) for number in stages if depths[number]]
        if not found:
            raise ConfigError(
                f"--stage {stage}: this stage has no blocks, so it has no attention to draw"
            )
        return found
    for number in stages:
        if not 1 <= block <= depths[number]:
            has = f"blocks 1 to {depths[number]}" if depths[number] else "no blocks"
            raise ConfigError(f"--block {block} does not exist: stage {number + 1} has {has}")
    return [(number, block - 1) for number in stages]


def rows_of(
    shown: AttentionInput, stage: int, block: int, pixel: tuple[int, int], only: str | None
) -> list[Row]:
    """Return the rows of the figure for one transformer block. The first row has the attention maps
    of the query token at a pixel. Then each global token has a row.

    shown: the image. stage, block: indices from 0. pixel: (row, col). only: "token" for only the
    first row, "global" for only the rows of global tokens, None for all. Raises ValueError if no
    token covers the pixel, or if this type of attention has no maps.
    """
    model, batch = shown.network, shown.batch
    num_global, asked = model.specs[stage].num_global, {}
    where = f"stage {stage + 1}, block {block + 1}"
    side = math.prod(each.embed.patch for each in model.stages[: stage + 1])
    if only != "global":
        (x, y), row, col = model.grids(batch.shape[-2:])[stage], pixel[0] // side, pixel[1] // side
        if not (row < x and col < y):
            raise ValueError(
                f"no token covers pixel {pixel[0]},{pixel[1]}: the {x} x {y} tokens cover only "
                f"rows 0 to {x * side - 1} and columns 0 to {y * side - 1} of the image"
            )
        title = f"{where}\ntoken {row},{col} of {x} x {y}"
        asked[num_global + row * y + col] = title, (row * side, col * side, side)
    if only != "token":
        asked |= {n: (f"{where}\nglobal token {n + 1}", None) for n in range(num_global)}
    if not asked:
        return []
    found = attention_maps(model, batch, stage, block, list(asked), shown.valid)
    weights = found.weights[0].cpu().double().numpy()
    return [
        Row(title, weights[:, n], num_global, found.cells, side * found.ratio, square)
        for n, (title, square) in enumerate(asked.values())
    ]


def visualize_pattern(
    grid: str,
    window: int | None,
    out: Path,
    *,
    masks: Sequence[int] = (0,),
    modes: Sequence[int] = (0,),
    tokens: Sequence[str] = (),
    patterns: Sequence[str] = (),
) -> None:
    """Draw attention patterns to the file `out`, one per panel.

    grid: rows and columns of tokens, such as "12x17", or "14" for 14 x 14.
    window: side, in tokens, of the square chunks of local attention.
    masks, modes: values of the config keys SW_EXACT and MODE, which determine the keys of a query.
    tokens: "row,col" of the queries, by default the middle token.
    patterns: patterns to draw instead of `window`, `masks` and `modes`, see `vil.ops.patterns`.

    Panel i uses item i of `masks`, `modes`, `tokens` and `patterns`. If one of these has a single
    item, all panels use it.
    """
    size = grid_of(grid)
    tokens = list(tokens) or [f"{size[0] // 2},{size[1] // 2}"]
    if patterns:
        lists = {"--pattern": list(patterns), "--token": tokens}
        panels = [pattern_panel(size, *row) for row in zip(*paired(lists))]
    else:
        lists = {"--sw-exact": list(masks), "--mode": list(modes), "--token": tokens}
        panels = [panel(size, window, *row) for row in zip(*paired(lists))]
    with replacing(out) as aside:
        draw_patterns(panels, aside)


def grid_of(text: str) -> tuple[int, int]:
    """Parse the size of a grid: "12x17" as (12, 17), and "14" as (14, 14). Raises ConfigError for
    an invalid grid."""
    found = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text)
    if not found:
        raise ConfigError(
            f"--grid {text}: expected rows and columns, such as 12x17, or the side of a square "
            "grid, such as 14"
        )
    grid = int(found[1]), int(found[2] or found[1])
    if not 1 <= min(grid) <= max(grid) <= MOST:
        raise ConfigError(f"--grid {text}: expected 1 to {MOST} tokens along a side")
    return grid


def parse_token(text: str, size: tuple[int, int], unit: str) -> tuple[int, int]:
    """Parse a position: "3,4" as (3, 4). Raises ConfigError for invalid text, and for a position
    outside of `size`. unit: unit of `size` for the message, "tokens" or "pixels"."""
    found = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
    if not found:
        raise ConfigError(
            f"--token {text}: expected a row and a column, counted from 0, such as 3,4"
        )
    row, col = int(found[1]), int(found[2])
    if not (row < size[0] and col < size[1]):
        raise ConfigError(f"--token {text}: outside of {size[0]} x {size[1]} {unit}")
    return row, col


def paired(lists: dict[str, list]) -> list[list]:
    """Extend each one-item list to the length of the longest list by repeating its item.

    lists: {command-line flag: items}. Raises ConfigError if a list with several items is shorter
    than the longest list.
    """
    most = max(map(len, lists.values()))
    for flag, items in lists.items():
        if len(items) not in (1, most):
            raise ConfigError(
                f"{flag} has {len(items)} items, but the longest list of {', '.join(lists)} has "
                f"{most}: give {flag} 1 or {most} items"
            )
    return [items * most if len(items) == 1 else items for items in lists.values()]


def panel(grid: tuple[int, int], size: int, exact: int, mode: int, token: str) -> tuple:
    """Return a panel for `draw_patterns`: (title, array that marks the keys of a query, `size`).

    size: side of a chunk. exact: value of the config key SW_EXACT. mode: value of the config key
    MODE. token: "row,col" of the query.
    """
    place = parse_token(token, grid, "tokens")
    if size > WIDEST:
        raise ConfigError(f"--window {size}: expected at most {WIDEST} tokens")
    try:
        window = Window.from_mode(grid, size, exact, mode)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    met = [(row, col) for row, col, _ in attended_keys(window, *place)]
    title = f"SW_EXACT {exact} ({Mask(exact).name.lower()}), MODE {mode}"
    return _titled(title, met, grid), seen_from(met, grid, place), size


def pattern_panel(grid: tuple[int, int], text: str, token: str) -> tuple:
    """Return a panel for `draw_patterns` that shows which tokens of the grid a query attends to,
    in any of the heads.

    text: an attention pattern, see `vil.ops.patterns`. token: "row,col" of the query. Returns
    (title, array that marks the attended tokens, longer side of the grid).
    """
    place = parse_token(token, grid, "tokens")
    try:
        _, visible = keys_of_pattern(Layout(grid, max(grid), parse_pattern(text)), *place)
    except ValueError as error:
        raise ConfigError(f"--pattern {text}: {error}") from error
    met = [divmod(key, grid[1]) for key in visible.any(0).nonzero()[:, 0].tolist()]
    return _titled(text, met, grid), seen_from(met, grid, place), max(grid)


def _titled(title: str, keys: Sequence[tuple[int, int]], grid: tuple[int, int]) -> str:
    """Add a line with the number of attended tokens to the title of a panel. keys: (row, col) of
    the attended tokens. A token may occur several times. grid: rows and columns of tokens."""
    return f"{title}\n{len(set(keys))} of {grid[0] * grid[1]} tokens, plus the global tokens"
