"""Export models to ONNX files."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from vil.export.runtime import require
from vil.export.trace import ExportSpec, as_export_error, trace_model

FIRST_OPSET = 18  # the lowest opset that torch writes; it cannot convert MsViT to a lower one
# ends of the names of node metadata to keep, because quantization reads them; torch's other
# metadata contains paths of source files
KEPT = ("class_hierarchy", "name_scopes")
# limit on the size of the weights; for larger ones, torch writes a second file, which `write_aside`
# would leave behind
MAX_BYTES = 1536 * 2**20
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def require_onnx() -> None:
    """Raise ImportError if a package that is needed to write or run ONNX files is missing."""
    for package in PACKAGES:
        require(package)


def check_opset(opset: int | None) -> None:
    """Raise ValueError for an unsupported ONNX opset, and ImportError if a package that is needed
    to write or run ONNX files is missing. opset: the version; None for torch's default."""
    onnx, *_ = map(require, PACKAGES)
    last = onnx.defs.onnx_opset_version()
    if opset is not None and not FIRST_OPSET <= opset <= last:
        raise ValueError(f"opset {opset} is not supported: choose from {FIRST_OPSET} to {last}")


def write_onnx(model: nn.Module, spec: ExportSpec, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a model as an ONNX file that maps images (B, channels, H, W) to logits (B, classes).
    Raises ValueError if the model or the opset is not supported, or if the weights are larger than
    MAX_BYTES (1.5 GiB)."""
    traced = trace_model(model, spec)
    with torch.no_grad(), as_export_error("ONNX"):
        program = torch.onnx.export(
            traced,
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=[spec.output],
            dynamic_shapes=spec.select_axes("batch", "height", "width"),
            opset_version=spec.opset,
            optimize=False,
        )
        optimizer = require("onnxscript.optimizer")
        optimizer.optimize_ir(program.model, should_fold=_should_fold)
    written = program.model.opset_imports[""]
    if spec.opset not in (None, written):
        raise ValueError(
            f"torch wrote ONNX opset {written} instead of the requested opset {spec.opset}: "
            f"set the opset to {written}, or leave it out"
        )
    for node in program.model.graph:
        kept = {k: v for k, v in node.metadata_props.items() if k.endswith(KEPT)}
        node.metadata_props.clear()
        node.metadata_props.update(kept)
    program.model.metadata_props.update(metadata)
    constants = (value.const_value for value in program.model.graph.initializers.values())
    size = sum(constant.nbytes for constant in constants if constant is not None)
    if size > MAX_BYTES:
        raise ValueError(
            f"the model has {size >> 20} MiB of weights, more than the limit of "
            f"{MAX_BYTES >> 20} MiB for an ONNX file: use the format torch"
        )
    program.save(path)


def _should_fold(node) -> bool | None:
    """Return whether onnxscript's optimizer may fold an ONNX node with constant inputs.

    Returns False for Resize, which onnxscript computes incorrectly. Returns None for other nodes,
    which lets the optimizer decide.
    """
    return False if node.op_type == "Resize" else None
