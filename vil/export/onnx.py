"""Write models as ONNX files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from vil.export.runtime import require
from vil.export.trace import as_export_error, select_axes, trace_model

FIRST_OPSET = 18  # the lowest that torch writes; it cannot convert MsViT to lower ones
# metadata of nodes that quantization reads; torch's other metadata has paths of source files
KEPT = ("class_hierarchy", "name_scopes")


def check_opset(opset: int | None) -> None:
    """Raise ValueError for an unsupported opset, ImportError for a missing package."""
    onnx, *_ = map(require, ("onnx", "onnxscript", "onnxruntime"))
    last = onnx.defs.onnx_opset_version()
    if opset is not None and not FIRST_OPSET <= opset <= last:
        raise ValueError(f"opset {opset} is not supported, only {FIRST_OPSET} to {last}")


def write_onnx(
    model: nn.Module,
    size: tuple[int, int],
    dynamic: Sequence[str],
    path: Path,
    opset: int | None,
    metadata: Mapping[str, str],
) -> None:
    """Write an ONNX file: images (B, c, H, W) -> logits (B, K). See `export_model`."""
    axes = {"batch": {0: "batch"}, "size": {2: "height", 3: "width"}}
    traced = trace_model(model, size, dynamic)
    with torch.no_grad(), as_export_error("ONNX"):
        program = torch.onnx.export(
            traced,
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=(select_axes(axes, dynamic),),  # names of the axes
            opset_version=opset,
            optimize=False,
        )
        optimizer = require("onnxscript.optimizer")
        optimizer.optimize_ir(program.model, should_fold=_should_fold)
    written = program.model.opset_imports[""]
    if opset not in (None, written):
        raise ValueError(f"opset {opset} cannot be reached, torch wrote {written}")
    for node in program.model.graph:
        kept = {k: v for k, v in node.metadata_props.items() if k.endswith(KEPT)}
        node.metadata_props.clear()
        node.metadata_props.update(kept)
    program.model.metadata_props.update(metadata)
    program.save(path)


def _should_fold(node) -> bool | None:
    """None lets onnxscript decide. It folds Resize of constants wrongly; runtimes do not."""
    return False if node.op_type == "Resize" else None
