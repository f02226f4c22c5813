"""Models as files that other programs run: ONNX, and programs of torch.export.

    export_model(model, "vil.onnx", size=(224, 224))       images (B, c, H, W) -> logits (B, K)
    load_exported("vil.onnx")(images)                      vil/export/runtime.py

A copy of the model is traced on the CPU, in float32 and in evaluation (random shift sees all nine
chunks there), its local attention computed by the backend of plain operators. Batch and image size
stay open unless they are to be fixed. Each file is opened again and compared with the model before
it gets its name.

Letters: B images, c channels, H W their size, K classes.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vil
from vil.export.runtime import METADATA, load_exported, quiet, require
from vil.export.trace import (
    as_export_error,
    axes_of,
    backends,
    channels,
    least_side,
    stride,
    traced,
)
from vil.models.arch import format_arch, format_attention
from vil.models.vision_longformer import MsViT
from vil.utils.atomic_write import write_aside
from vil.utils.errors import ExportError, one_line
from vil.utils.lookup import lookup

OPEN = ("batch", "size")  # what may stay open
LIMIT = 1e-4  # difference of logits from the model's, of the largest logit if that is above 1
FIRST_OPSET = 18  # that torch writes; it turns none of our models into older ones
REFUSALS = (ValueError, RuntimeError, AssertionError, TypeError, IndexError)
NOTES = ("class_hierarchy", "name_scopes")  # what nodes keep of torch's notes, for quantization


class Difference(NamedTuple):
    """How far a file's logits are from the model's, at most, on images of a shape."""

    shape: tuple[int, int, int, int]
    largest: float


def export_model(
    model: nn.Module,
    path: str | Path,
    *,
    size: tuple[int, int],
    format: str | None = None,
    dynamic: Sequence[str] = OPEN,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[Difference]:
    """Write a model as a file; returns its differences from the model on images of some shapes.

    size: height and width of images, those of every image unless `size` is in `dynamic`.
    format: onnx or torch; by default what the path ends with says (.onnx, .pt2).
    dynamic: what stays open, of `batch` and `size`; else the file takes one image, of `size`.
    opset: of ONNX, from 18 up; torch's choice by default.
    metadata: kept in the file beside vil's version, the architecture and the size.
    Raises ValueError for settings that do not fit and for what the model cannot do, with the
    reason; ExportError for a file that differs from the model by more than LIMIT; OSError where it
    cannot be written; ImportError that names the extra to install.
    """
    path, plain = Path(path), copy.deepcopy(model).to("cpu", torch.float32).eval()
    format = format or format_of(path)
    write = lookup(WRITERS, format, "format")
    for name in dynamic:
        lookup(dict.fromkeys(OPEN), name, "dimension to leave open")
    _check_settings(plain, write, size, dynamic, opset)
    wanted = _logits(plain, size, dynamic)
    notes = _notes(plain, size, dynamic) | dict(metadata or {})
    with write_aside(path) as aside:
        with quiet():
            write(plain, size, dynamic, aside, opset, notes)
        return _compare(aside, format, wanted, path)


def format_of(path: Path) -> str:
    """The format that a file's name stands for; ValueError for other names."""
    kinds = {".onnx": "onnx", ".pt2": "torch"}
    return kinds[path.suffix] if path.suffix in kinds else lookup(kinds, path.suffix, "ending")


def _check_settings(
    model: nn.Module,
    write: Callable,
    size: tuple[int, int],
    dynamic: Sequence[str],
    opset: int | None,
) -> None:
    if isinstance(model, MsViT) and min(size) < stride(model):
        raise ValueError(
            f"images of {_by(size)} leave the last stage no token: {stride(model)} pixels a side "
            "at least"
        )
    if write is _write_onnx:
        onnx, *_ = map(require, ("onnx", "onnxscript", "onnxruntime"))
        last = onnx.defs.onnx_opset_version()
        if opset is not None and not FIRST_OPSET <= opset <= last:
            raise ValueError(f"opset {opset} is not among those written, {FIRST_OPSET} to {last}")
    elif opset is not None:
        raise ValueError("an opset is a matter of ONNX: a program of torch has none")
    elif "size" in dynamic and min(size) < least_side(model):
        raise ValueError(
            f"a program of torch with an open size takes images of {least_side(model)} pixels a "
            f"side and more, not {_by(size)}: fix the size, or write ONNX"
        )


# What the file must give


def _logits(
    model: nn.Module, size: tuple[int, int], dynamic: Sequence[str]
) -> list[tuple[Tensor, Tensor]]:
    """Images and the model's logits: of `size`, and of what else shall be possible."""
    found, reason = [], None
    generator = torch.Generator().manual_seed(0)
    for shape in _shapes(model, size, dynamic):
        images = torch.randn(shape, generator=generator)
        try:
            with backends(model, "auto"), torch.no_grad():
                found.append((images, model(images)))
        except REFUSALS as error:  # models that are not ours raise many kinds
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            if shape[2:] == size:
                raise ValueError(f"the model takes no images of {_by(size)}: {reason}") from error
    if reason and {images.shape[2:] for images, _ in found} == {size}:
        raise ValueError(f"the model takes images of {_by(size)} only, so fix the size: {reason}")
    return found


def _shapes(
    model: nn.Module, size: tuple[int, int], dynamic: Sequence[str]
) -> list[tuple[int, int, int, int]]:
    """Images to compare on: some, if batch and size are open, that fill no patch."""
    (rows, cols), step, least = size, stride(model), least_side(model)
    sizes = [size] * 3
    if "size" in dynamic:
        sizes[1:] = [
            (max(least, rows - step - 1), max(least, cols)),
            (max(least, rows) + step // 2, max(least, cols) + step),
        ]
    batches = (1, 3, 2) if "batch" in dynamic else (1, 1, 1)
    shapes = ((batch, channels(model), *each) for batch, each in zip(batches, sizes))
    return list(dict.fromkeys(shapes))


def _compare(
    file: Path, format: str, wanted: list[tuple[Tensor, Tensor]], path: Path
) -> list[Difference]:
    """ExportError where the logits of a file that shall become `path` are not the model's."""
    found, run = [], load_exported(file, format)
    for images, logits in wanted:
        shape = " x ".join(map(str, images.shape))
        try:
            largest = (run(images) - logits).abs().max().item()
        except Exception as error:  # every runtime has its own
            raise ExportError(
                f"{path} is not written, it fails on {shape} images: {one_line(error)}"
            ) from error
        if not largest <= LIMIT * max(1.0, logits.abs().max().item()):  # NaN is no match either
            raise ExportError(
                f"{path} is not written, its logits for {shape} images "
                f"differ from the model's by {largest:.1e}, more than {LIMIT:.0e} of the largest"
            )
        found.append(Difference(tuple(images.shape), largest))
    return found


# How it is written


def _write_onnx(
    model: nn.Module,
    size: tuple[int, int],
    dynamic: Sequence[str],
    path: Path,
    opset: int | None,
    notes: Mapping[str, str],
) -> None:
    names = {"batch": {0: "batch"}, "size": {2: "height", 3: "width"}}
    found = traced(model, size, dynamic)
    with torch.no_grad(), as_export_error("ONNX"):
        program = torch.onnx.export(
            found,
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=(axes_of(names, dynamic),),  # their names
            opset_version=opset,
            optimize=False,
        )
        optimizer = require("onnxscript.optimizer")
        optimizer.optimize_ir(program.model, should_fold=_may_be_folded)
    reached = program.model.opset_imports[""]
    if opset not in (None, reached):
        raise ValueError(f"opset {opset} cannot be reached, torch wrote {reached}")
    for node in program.model.graph:  # torch notes the paths of our source files too
        kept = {k: v for k, v in node.metadata_props.items() if k.endswith(NOTES)}
        node.metadata_props.clear()
        node.metadata_props.update(kept)
    program.model.metadata_props.update(notes)
    program.save(path)


def _may_be_folded(node) -> bool | None:
    """None: onnxscript decides. It computes the resizing of constants wrongly, runtimes do not."""
    return False if node.op_type == "Resize" else None


def _write_program(
    model: nn.Module,
    size: tuple[int, int],
    dynamic: Sequence[str],
    path: Path,
    opset: None,
    notes: Mapping[str, str],
) -> None:
    program = traced(model, size, dynamic)
    torch.export.save(program, path, extra_files={METADATA: json.dumps(dict(notes))})


WRITERS = {"onnx": _write_onnx, "torch": _write_program}


def _notes(model: nn.Module, size: tuple[int, int], dynamic: Sequence[str]) -> dict[str, str]:
    """What every file says of itself."""
    notes = {
        "vil_version": vil.__version__,
        "input_size": _by(size),
        "dynamic": ",".join(dynamic) or "none",
    }
    if isinstance(model, MsViT):
        notes |= {"arch": format_arch(model.specs), "attention": format_attention(model.specs)}
    return notes


def _by(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
