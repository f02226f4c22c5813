"""Export a model to a file, and compare the outputs of the file and the model.

A copy of the model is traced on the CPU, in float32 and in evaluation mode, with an attention
backend that uses only standard operators. In an exported model, a query attends to all 3x3 chunks
around it, even if the model was trained with random shift. The file gets its final name only if its
outputs agree with those of the model.

Shapes: B batch, c input channels, H W image size.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vil
from vil.export.aoti import check_compiler, write_package
from vil.export.onnx import check_opset, write_onnx
from vil.export.runtime import load_exported, quiet
from vil.export.trace import (
    ExportSpec,
    find_msvit,
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
TOLERANCE = 1e-4  # largest difference of outputs, relative to the largest one if that is above 1
WRITERS = {"onnx": write_onnx, "torch": write_program, "aoti": write_package}
SUFFIXES = {".onnx": "onnx", ".pt2": "torch"}
# exceptions that external models raise for image sizes that they do not support
SIZE_ERRORS = (ValueError, RuntimeError, AssertionError, TypeError, IndexError)


class Difference(NamedTuple):
    """Largest absolute difference between the outputs of an exported file and of the model, for
    random images of one shape (B, channels, H, W)."""

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
    output: str = "logits",
    compared: Callable[[Tensor], Tensor] = lambda outputs: outputs,
) -> list[Difference]:
    """Export a model to a file, and compare the outputs of the file and the model on random images.

    path: file to write.
    size: height and width of the images. The file accepts only this size unless `dynamic` contains
      "size".
    format: "onnx", "torch" or "aoti" (an AOTInductor package, whose name must end with .pt2). By
      default, the file's suffix selects "onnx" (.onnx) or "torch" (.pt2).
    dynamic: which of the dimensions "batch" and "size" stay dynamic. Without "batch", the file
      accepts batches of one image only.
    opset: ONNX opset, at least 18; None for torch's default.
    metadata: entries to store in addition to vil's version, the architecture, the image size and
      the dynamic dimensions.
    output: name of the outputs in an ONNX file.
    compared: maps outputs to the values to compare, such as numbers in units of their deviation.

    Returns a Difference for each image shape that was compared. Raises ValueError if settings
    contradict each other or the model does not support them, ExportError if the file's outputs
    differ from the model's, OSError if the file cannot be written, and ImportError, with the pip
    command to run, if a package is missing.
    """
    path, model = Path(path), copy.deepcopy(model).to("cpu", torch.float32).eval()
    spec = ExportSpec(size, dynamic, opset, output)
    format = format or lookup(SUFFIXES, path.suffix, "ending")
    write = lookup(WRITERS, format, "format")
    if format == "aoti" and path.suffix != ".pt2":
        raise ValueError(f"{path}: the name of an AOTInductor package must end with .pt2")
    for name in dynamic:
        lookup(dict.fromkeys(DYNAMIC), name, "dimension to keep dynamic")
    _check_settings(model, format, spec)
    expected = _run_model(model, spec)
    metadata = _make_metadata(model, spec) | dict(metadata or {})
    with write_aside(path) as aside:
        with quiet():
            write(model, spec, aside, metadata)
        return _compare(aside, format, expected, path, compared)


def _check_settings(model: nn.Module, format: str, spec: ExportSpec) -> None:
    size, stride, least = _format_size(spec.size), token_stride(model), least_side(model)
    if isinstance(model, MsViT) and min(spec.size) < stride:
        raise ValueError(
            f"images of {size} are too small: every side needs at least {stride} pixels"
        )
    if format == "onnx":
        check_opset(spec.opset)
        return
    if spec.opset is not None:
        raise ValueError(
            f"opset {spec.opset} can be set only for ONNX, not for the format {format!r}: "
            "leave out the opset"
        )
    if "size" in spec.dynamic and min(spec.size) < least:
        raise ValueError(
            f"images of {size} are too small for a torch.export program with a dynamic size, "
            f"which needs sides of at least {least} pixels: export with a fixed size (leave "
            "'size' out of `dynamic`), or export to ONNX"
        )
    if format == "aoti":
        check_compiler()


def _run_model(model: nn.Module, spec: ExportSpec) -> list[tuple[Tensor, Tensor]]:
    """Run the model on random images of several test shapes. Returns (images, outputs) pairs.

    Raises ValueError if the model does not accept images of the size `spec.size`, or if `spec`
    requests a dynamic size but the model accepts no other size.
    """
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
                raise ValueError(f"the model does not accept images of {size}: {reason}") from error
    if reason and {images.shape[2:] for images, _ in results} == {spec.size}:
        raise ValueError(
            f"the model accepts only images of {size}: leave 'size' out of `dynamic`. "
            f"The error for another size was: {reason}"
        )
    return results


def _test_shapes(model: nn.Module, spec: ExportSpec) -> list[tuple[int, int, int, int]]:
    """Return the image shapes (B, c, H, W) for which the exported file is compared with the model.
    If the size is dynamic, they include sizes that are not a multiple of the patch size."""
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
    file: Path,
    format: str,
    expected: list[tuple[Tensor, Tensor]],
    path: Path,
    compared: Callable[[Tensor], Tensor],
) -> list[Difference]:
    """Compare the outputs of an exported file with those of the model.

    expected: (images, outputs of the model) pairs. path: the final path of the file, for messages.
    compared: see `export_model`. Raises ExportError if the file cannot run, or if values to compare
    differ by more than TOLERANCE.
    """
    differences, run = [], load_exported(file, format)
    for images, outputs in expected:
        shape = " x ".join(map(str, images.shape))
        try:
            values = compared(outputs)
            largest = (compared(run(images)) - values).abs().max().item()
        except Exception as error:  # runtimes have their own exceptions
            raise ExportError(
                f"{path} was not written: running it on {shape} images failed: {one_line(error)}"
            ) from error
        limit = TOLERANCE * max(1.0, values.abs().max().item())
        if not largest <= limit:  # also if NaN
            raise ExportError(
                f"{path} was not written: its outputs for {shape} images differ from those of the "
                f"model by {largest:.1e}, but the tolerance is {limit:.1e}"
            )
        differences.append(Difference(tuple(images.shape), largest))
    return differences


def _make_metadata(model: nn.Module, spec: ExportSpec) -> dict[str, str]:
    """Return the metadata that every exported file has: vil's version, image size, dynamic
    dimensions and, for an MsViT, the architecture."""
    metadata = {"vil_version": vil.__version__, "input_size": _format_size(spec.size)}
    metadata["dynamic"] = ",".join(spec.dynamic) or "none"
    if network := find_msvit(model):
        specs = network.specs
        metadata |= {"arch": format_arch(specs), "attention": format_attention(specs)}
    return metadata


def _format_size(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
