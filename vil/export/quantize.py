"""Quantize the linear layers of ONNX files to int8."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from vil.export.runtime import quiet, require
from vil.utils.atomic_write import write_aside

LINEAR = ("MatMul", "Gemm")
MAX_CHUNK = 8  # images per call in calibration


def quantize_linears(
    path: str | Path, out: str | Path, calibration: Iterable[Tensor] | None = None
) -> int:
    """Write a copy of an ONNX file with int8 linear layers. Returns the number of these layers.

    path: a file written by `export_model`.
    calibration: batches of images (B, channels, H, W), normalized as for the model. They fix the
    value range of each linear layer's input. Inference clips values outside of this range (static
    quantization). If None, the ranges are computed at each inference (dynamic quantization).

    All other operations stay in float32. Raises ValueError if the file has no linear layers with
    the metadata that `export_model` writes, or if `calibration` has no images.
    """
    onnx, quantization = require("onnx"), require("onnxruntime.quantization")
    model = onnx.load(path)
    matmuls = [node for node in model.graph.node if node.op_type in LINEAR]
    others = [node.name for node in matmuls if not _is_linear(node)]
    if len(others) == len(matmuls):
        raise ValueError(
            f"{path} has no linear layers, or lacks the metadata that marks them: export the "
            "model again with vil export"
        )
    del model.graph.value_info[:]  # includes shapes of weights, which the quantizer transposes
    options = dict(
        nodes_to_exclude=others,
        per_channel=True,
        reduce_range=True,  # 7 bits: 8-bit matmuls would overflow on processors without VNNI
        weight_type=quantization.QuantType.QInt8,
    )
    with write_aside(Path(out)) as aside, quiet():
        if calibration is None:  # this quantizer converts Gemm to MatMul first
            quantization.quantize_dynamic(model, aside, op_types_to_quantize=["MatMul"], **options)
        else:
            quantization.quantize_static(
                model,
                aside,
                _reader(model, calibration),
                op_types_to_quantize=LINEAR,
                extra_options={"OpTypesToExcludeOutputQuantization": LINEAR},
                **options,
            )
    return len(matmuls) - len(others)


def _reader(model, batches: Iterable[Tensor]):
    """Return a reader of calibration images (B, channels, H, W) for onnxruntime's quantizer.

    It passes at most MAX_CHUNK images at a time, or one if the ONNX model has a fixed batch size.
    """
    graph_input = model.graph.input[0]
    fixed = graph_input.type.tensor_type.shape.dim[0].dim_value

    class Reader(require("onnxruntime.quantization").CalibrationDataReader):
        def __init__(self) -> None:
            self.parts = _split(batches, fixed or MAX_CHUNK)

        def get_next(self) -> dict | None:
            images = next(self.parts, None)
            return None if images is None else {graph_input.name: images.numpy()}

    return Reader()


def _split(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Split batches of images into batches of at most `size` images. Raises ValueError if there are
    no images."""
    empty = True
    for images in batches:
        for part in images.to(torch.float32).split(size):
            empty = False
            yield part.contiguous()
    if empty:
        raise ValueError("static quantization needs calibration images, got none")


def _is_linear(node) -> bool:
    """Return whether an ONNX node is the matmul of an nn.Linear, according to the metadata that
    torch stored in the node."""
    metadata = {entry.key.rpartition(".")[2]: entry.value for entry in node.metadata_props}
    return "torch.nn.modules.linear." in metadata.get("class_hierarchy", "")
