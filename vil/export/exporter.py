"""`export_model`: write a model as a file, and compare the file with the model.

A copy of the model is traced on the CPU, in float32 and in evaluation mode (random shift then
attends to all nine chunks), with local attention computed by a backend of plain operators. Batch
and image size stay dynamic unless they are fixed. A file gets its name only after it was opened
again and gave the model's logits.

Shapes: B batch, c input channels, H W image size, K classes.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vil
from vil.export.onnx import check_opset, write_onnx
from vil.export.runtime import load_exported, quiet
from vil.export.trace import (
    ExportSpec,
    in_channels,
    least_side,
    token_stride,
    use_backend,
    write_program,
)
from vil.models.arch import format_arch, format_attention
from vil.models.vision_longformer import MsViT
from vil.utils.atomic_write import write_aside
from vil.utils.errors import ExportError, one_line
from vil.utils.lookup import lookup

DYNAMIC = ("batch", "size")  # dimensions that may stay dynamic
TOLERANCE = 1e-4  # on logits, relative to the largest one if that is above 1
WRITERS = {"onnx": write_onnx, "torch": write_program}
SUFFIXES = {".onnx": "onnx", ".pt2": "torch"}
# what external models raise for image sizes that they do not take
SIZE_ERRORS = (ValueError, RuntimeError, AssertionError, TypeError, IndexError)


class Difference(NamedTuple):
    """Largest difference of a file's logits from the model's, on images of one shape."""

    shape: tuple[int, int, int, int]
    largest: float


def export_model(
    model: nn.Module,
    path: str | Path,
    *,
    size: tuple[int, int],
    format: str | None = None,
    dynamic: Sequence[str] = DYNAMIC,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[Difference]:
    """Write a model as a file. Returns its differences from the model on images of some shapes.

    size: height and width of images; of every image, unless `size` is in `dynamic`.
    format: onnx or torch, by default from the file's suffix (.onnx, .pt2).
    dynamic: dimensions that stay dynamic, of `batch` and `size`. A fixed batch is one image.
    opset: ONNX opset, at least 18; torch's default if None.
    metadata: stored in the file beside vil's version, the architecture and the size.
    Raises ValueError, with the reason, for settings that do not fit or that the model does not
    support; ExportError for a file whose logits differ from the model's; OSError if the file cannot
    be written; ImportError that names the extra to install.
    """
    path, model = Path(path), copy.deepcopy(model).to("cpu", torch.float32).eval()
    spec = ExportSpec(size, dynamic, opset)
    format = format or lookup(SUFFIXES, path.suffix, "ending")
    write = lookup(WRITERS, format, "format")
    for name in dynamic:
        lookup(dict.fromkeys(DYNAMIC), name, "dimension to leave open")
    _check_settings(model, format, spec)
    expected = _run_model(model, spec)
    metadata = _make_metadata(model, spec) | dict(metadata or {})
    with write_aside(path) as aside:
        with quiet():
            write(model, spec, aside, metadata)
        return _compare(aside, format, expected, path)


def _check_settings(model: nn.Module, format: str, spec: ExportSpec) -> None:
    size, stride, least = _format_size(spec.size), token_stride(model), least_side(model)
    if isinstance(model, MsViT) and min(spec.size) < stride:
        raise ValueError(
            f"images of {size} leave the last stage no token: {stride} pixels a side at least"
        )
    if format == "onnx":
        check_opset(spec.opset)
    elif spec.opset is not None:
        raise ValueError("only ONNX has an opset: a program of torch has none")
    elif "size" in spec.dynamic and min(spec.size) < least:
        raise ValueError(
            f"a program of torch with an open size takes images of {least} pixels a side and more, "
            f"not {size}: fix the size, or write ONNX"
        )


def _run_model(model: nn.Module, spec: ExportSpec) -> list[tuple[Tensor, Tensor]]:
    """Return images and the model's logits, of `spec.size` and of other shapes if dynamic."""
    results, reason, size = [], None, _format_size(spec.size)
    generator = torch.Generator().manual_seed(0)
    for shape in _test_shapes(model, spec):
        images = torch.randn(shape, generator=generator)
        try:
            with use_backend(model, "auto"), torch.no_grad():
                results.append((images, model(images)))
        except SIZE_ERRORS as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            if shape[2:] == spec.size:
                raise ValueError(f"the model takes no images of {size}: {reason}") from error
    if reason and {images.shape[2:] for images, _ in results} == {spec.size}:
        raise ValueError(f"the model takes images of {size} only, so fix the size: {reason}")
    return results


def _test_shapes(model: nn.Module, spec: ExportSpec) -> list[tuple[int, int, int, int]]:
    """Return shapes of images to compare on. Some dynamic sizes do not fill the last patch."""
    (rows, cols), stride, least = spec.size, token_stride(model), least_side(model)
    sizes = [spec.size] * 3
    if "size" in spec.dynamic:
        sizes[1:] = [
            (max(least, rows - stride - 1), max(least, cols)),
            (max(least, rows) + stride // 2, max(least, cols) + stride),
        ]
    batches = (1, 3, 2) if "batch" in spec.dynamic else (1, 1, 1)
    shapes = ((batch, in_channels(model), *hw) for batch, hw in zip(batches, sizes))
    return list(dict.fromkeys(shapes))


def _compare(
    file: Path, format: str, expected: list[tuple[Tensor, Tensor]], path: Path
) -> list[Difference]:
    """Raise ExportError if the logits of `file`, the future `path`, are not the expected ones."""
    differences, run = [], load_exported(file, format)
    for images, logits in expected:
        shape = " x ".join(map(str, images.shape))
        try:
            largest = (run(images) - logits).abs().max().item()
        except Exception as error:  # runtimes have their own exceptions
            raise ExportError(
                f"{path} is not written, it fails on {shape} images: {one_line(error)}"
            ) from error
        if not largest <= TOLERANCE * max(1.0, logits.abs().max().item()):  # also if NaN
            raise ExportError(
                f"{path} is not written, its logits for {shape} images differ from the model's by "
                f"{largest:.1e}, more than {TOLERANCE:.0e} of the largest"
            )
        differences.append(Difference(tuple(images.shape), largest))
    return differences


def _make_metadata(model: nn.Module, spec: ExportSpec) -> dict[str, str]:
    """Return the metadata that every file has."""
    metadata = {"vil_version": vil.__version__, "input_size": _format_size(spec.size)}
    metadata["dynamic"] = ",".join(spec.dynamic) or "none"
    if isinstance(model, MsViT):
        metadata |= {"arch": format_arch(model.specs), "attention": format_attention(model.specs)}
    return metadata


def _format_size(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
