"""Plan and run a forward pass over an image that does not fit into memory (`vil.stream`).

Shapes: H W image size in pixels, c channels, d width and X Y grid of a stage, K classes.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vil.models.vision_longformer import MsViT
from vil.streaming.checks import check_outputs, find_network, needs_head, stage_of
from vil.streaming.heads import Head
from vil.streaming.images import ImageRows, Pixels, Transform, open_pixels
from vil.streaming.journal import Journal
from vil.streaming.outputs import StreamResult, check_into, map_shapes, writer_into
from vil.streaming.passes import Passes
from vil.streaming.plan import StreamPlan, parse_bytes
from vil.streaming.planner import Planner
from vil.streaming.progress import Report
from vil.streaming.store import Stores, check_scratch
from vil.utils.errors import ConfigError, as_config_error

MEMORY = "1GiB"
LOGITS = ("logits",)


def stream(
    model: nn.Module,
    image: Any,
    *,
    outputs: Sequence[str] = LOGITS,
    into: Mapping[str, Any] | None = None,
    memory: int | str = MEMORY,
    scratch: str | Path | None = None,
    layout: str = "CHW",
    transform: Transform | None = None,
) -> StreamResult:
    """Run a model on an image of any size in bounded memory. The result is that of `model(image)`.

    model: a `vil.models.vision_longformer.MsViT` with local, global or full attention.
    image: an array or another object with `shape`, `dtype` and slicing, a reader with rasterio's
      `read(window=)`, or the path of a .tif, .png, .jpg, .npy or .zarr file. Its values must be
      normalized floats, unless a `transform` is passed. The image is read from top to bottom, and
      cast to the dtype of the model's parameters. Each row is read only once, unless attention
      wraps around the image (SW_EXACT -1).
    outputs: "logits", "pooled" (the features before the head), and "stages.0", "stages.1", ..., the
      maps of `forward_intermediates`. If the model does not pool (global_pool ""), logits and
      pooled features are also maps.
    into: {output: array (channels, rows, columns)} of NumPy, torch or zarr arrays, to which maps
      are written strip by strip. Other maps are returned as tensors.
    memory: limit for the bytes of tensors, excluding the weights, the image and `into`, as a number
      or as text such as "1GiB".
    scratch: folder for tokens that do not fit into `memory`. The files are removed at the end.
    layout: order of the axes of an array, a .npy file or a .zarr file: "CHW" for (c, H, W), "HWC"
      for (H, W, c).
    transform: function that converts n rows of pixels (c, n, W) to floats of the same shape, such
      as `vil.streaming.Normalize`. Its input has the dtype of the image, but uint16 is converted
      to int32.

    Autocast works as in `model(image)`. Before any work, raises ConfigError if the model cannot be
    streamed, if the image or `into` does not match the model, or if no plan stays within `memory`.
    Raises DataError if a file cannot be read, and SaveError if the disk is full.
    """
    run = prepare(model, image, outputs=outputs, into=into, layout=layout, transform=transform)
    plan = run.planner.choose(_limit(memory))
    if not plan.scratch_bytes:
        return run.execute(plan)
    if scratch is None:
        raise ConfigError(
            f"{plan.scratch_bytes} bytes of tokens do not fit into memory={memory}: give "
            "scratch=FOLDER to store them on disk, or increase `memory`"
        )
    place = check_scratch(scratch, plan.scratch_bytes)
    options = dict(prefix="vil-stream-", ignore_cleanup_errors=True)
    with tempfile.TemporaryDirectory(dir=place, **options) as folder:
        return run.execute(plan, folder=Path(folder))


@torch.no_grad()
def plan_stream(
    model: nn.Module,
    size: tuple[int, int],
    memory: int | str = MEMORY,
    *,
    outputs: Sequence[str] = LOGITS,
) -> StreamPlan:
    """Plan `vil.stream` for an image of `size` (H, W) in pixels, without reading an image.

    For each stage, the plan states where its tokens are stored, the number of passes, the strip
    heights, the peak bytes and the matmul work. `print(plan)` shows a table. The memory of
    outputs that are maps is not counted, as if the caller passed arrays for them to `vil.stream`
    (`into`). memory, outputs: see `vil.stream`. Raises ConfigError if the model cannot be streamed,
    if `size` is invalid, or if no plan stays within `memory`.
    """
    network = find_network(model)
    names = check_outputs(network, outputs)
    size = _check_size(size)
    given = tuple(map_shapes(network, names, size))
    dtype = next(network.parameters()).dtype
    return Planner(network, size, names, dtype=dtype, given=given).choose(_limit(memory))


@as_config_error
def _limit(memory: int | str) -> int:
    return parse_bytes(memory)


def _check_size(size: Any) -> tuple[int, int]:
    try:
        height, width = (int(n) for n in size)
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise ConfigError(f"size must be (height, width) in pixels, got {size!r}")
    return height, width


class PreparedStream:
    """A streamed forward pass that is ready to run, because its inputs have been checked. `planner`
    chooses a plan, and `execute` runs the plan."""

    def __init__(
        self,
        model: MsViT,
        pixels: Pixels,
        names: tuple[str, ...],
        into: Mapping[str, Any] | None,
        transform: Transform | None,
        *,
        pad: bool = False,
    ) -> None:
        parameter = next(model.parameters())
        self.model, self.names, self.size = model, names, pixels.size
        self.image = ImageRows(pixels, parameter.dtype, parameter.device, transform)
        with torch.no_grad():
            self.planner = Planner(
                model,
                pixels.size,
                names,
                dtype=parameter.dtype,
                copies=self.image.copies,
                given=tuple(into or ()),
                pad=pad,
            )
        self.shapes = map_shapes(model, names, pixels.size, pad=pad)
        self.into = check_into(into, names, self.shapes)

    @torch.no_grad()
    def execute(
        self,
        plan: StreamPlan,
        *,
        folder: Path | None = None,
        journal: Journal | None = None,
        progress: Report = lambda share: None,
    ) -> StreamResult:
        """Run a plan and return its outputs.

        folder: where tokens are stored, required only if the plan stores tokens on disk. journal:
        records the progress, so that the run can be resumed. progress: function that is called with
        the fraction of the work that is done.
        """
        maps = {name: self.into.get(name) for name in self.shapes}
        device = self.image.device
        for name, target in maps.items():
            if target is None:
                own = self.planner.dtype_of(name)
                maps[name] = torch.empty(self.shapes[name], dtype=own, device=device)
        writers = {name: writer_into(target) for name, target in maps.items()}
        head = Head(self.model, writers) if needs_head(self.names) else None
        passes = Passes(
            self.model,
            plan,
            self.planner.shapes,
            self.planner.dtypes,
            writers={
                index: write
                for name, write in writers.items()
                if (index := stage_of(name)) is not None
            },
            head=head,
            stores=Stores(folder, device),
            journal=journal or Journal(),
            progress=progress,
        )
        passes.run(self.image)
        results = maps | (head.results if head else {})
        return StreamResult({name: results[name] for name in self.names}, plan)


def prepare(
    model: nn.Module,
    image: Any,
    *,
    outputs: Sequence[str] = LOGITS,
    into: Mapping[str, Any] | None = None,
    layout: str = "CHW",
    transform: Transform | None = None,
    pad: bool = False,
) -> PreparedStream:
    """Check the model, image and outputs of a streamed forward pass, and open the image.

    pad: pad patches at the bottom and right with zeros, instead of dropping the pixels that do not
    fill a patch. The maps are those of `forward_intermediates` for an image that is padded to a
    multiple of the coarsest stride, with its size as `valid`, but without the tokens that are
    entirely in the padding. `stream` describes the other arguments and the errors.
    """
    network = find_network(model)
    names = check_outputs(network, outputs)
    pixels = open_pixels(image, layout, network.in_chans)
    return PreparedStream(network, pixels, names, into, transform, pad=pad)
