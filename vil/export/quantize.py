"""Quantize the linear layers of ONNX files to int8."""

from pathlib import Path

from vil.export.runtime import quiet, require
from vil.utils.atomic_write import write_aside


def quantize_linears(path: str | Path, out: str | Path) -> int:
    """Write a copy of an ONNX file with linear layers in int8. Returns the number of layers.

    Weights are int8 with one scale per output channel and 7 bits: products of 8 bits overflow the
    accumulators of processors without VNNI. Inputs of linear layers are quantized dynamically, by
    their own range. Everything else (softmax, norms, convolutions, random features) stays float32.
    Raises ValueError for a file without linear layers that `export_model` marked.
    """
    onnx, quantization = require("onnx"), require("onnxruntime.quantization")
    model = onnx.load(path)
    matmuls = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    others = [node.name for node in matmuls if not _is_linear(node)]
    if len(others) == len(matmuls):
        raise ValueError(f"{path} has no linear layers that vil export marked")
    del model.graph.value_info[:]  # includes shapes of weights, which the quantizer transposes
    with write_aside(Path(out)) as aside, quiet():
        quantization.quantize_dynamic(
            model,
            aside,
            op_types_to_quantize=["MatMul"],  # the quantizer converts Gemm to MatMul first
            nodes_to_exclude=others,
            per_channel=True,
            reduce_range=True,
            weight_type=quantization.QuantType.QInt8,
        )
    return len(matmuls) - len(others)


def _is_linear(node) -> bool:
    """Whether a node multiplies by the weights of an nn.Linear, by torch's node metadata."""
    metadata = {entry.key.rpartition(".")[2]: entry.value for entry in node.metadata_props}
    return "torch.nn.modules.linear." in metadata.get("class_hierarchy", "")
