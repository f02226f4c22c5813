"""Files that `vil.export.onnx` wrote, opened again: as modules, and with linears in int8.

ONNX files need no part of this package to run; here they look like any other model, so that the
same evaluation judges them.
"""

import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from vil.utils.atomic_write import write_aside

METADATA = "metadata.json"  # in a program of torch


class Exported(nn.Module):
    """A file as a module: images (B, c, H, W) float32 on the CPU -> logits (B, K).

    metadata: what the file says of itself.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], metadata: Mapping[str, str]) -> None:
        super().__init__()
        self.run, self.metadata = run, dict(metadata)

    def forward(self, images: Tensor) -> Tensor:
        """images (B, c, H, W) -> (B, K)."""
        return self.run(images.detach().contiguous())


def load_exported(path: str | Path, format: str | None = None) -> Exported:
    """Open a file, by default as what its name ends with says.

    ONNX runs in onnxruntime on the CPU, with as many threads as torch has there.
    """
    opener = {"onnx": _open_onnx, "torch": _open_program}
    return opener[format or ("onnx" if Path(path).suffix == ".onnx" else "torch")](Path(path))


def _open_onnx(path: Path) -> Exported:
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # what it warns of is its own optimizer
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: images.numpy()})[0])

    return Exported(run, session.get_modelmeta().custom_metadata_map)


def _open_program(path: Path) -> Exported:
    kept = {METADATA: ""}
    with quiet():
        module = torch.export.load(path, extra_files=kept).module()
    # a function and not a part: torch's modules of programs refuse train() and eval()
    return Exported(module.forward, json.loads(kept[METADATA] or "{}"))


def quantize_linears(path: str | Path, out: str | Path) -> int:
    """Write an ONNX file anew with linear layers in int8; returns how many there are.

    Weights are int8 with a scale per output channel, of 7 bits: products of 8 bits overflow the
    sums of processors without VNNI. Inputs of linears are quantized as they come, by their own
    range. All else (softmax, norms, convolutions, random features) stays in float32. Raises
    ValueError for a file without linears that `export_model` named.
    """
    onnx, quantization = require("onnx"), require("onnxruntime.quantization")
    model = onnx.load(path)
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    others = [node.name for node in products if not _is_linear(node)]
    if len(others) == len(products):
        raise ValueError(f"{path} has no linear layers that vil export named")
    del model.graph.value_info[:]  # shapes of weights too, which the quantizer transposes
    with write_aside(Path(out)) as aside, quiet():
        quantization.quantize_dynamic(
            model,
            aside,
            op_types_to_quantize=["MatMul"],  # a Gemm becomes one on the way
            nodes_to_exclude=others,
            per_channel=True,
            reduce_range=True,
            weight_type=quantization.QuantType.QInt8,
        )
    return len(products) - len(others)


def _is_linear(node) -> bool:
    """Whether a node multiplies by the weights of an nn.Linear, by torch's notes."""
    notes = {entry.key.rpartition(".")[2]: entry.value for entry in node.metadata_props}
    return "torch.nn.modules.linear." in notes.get("class_hierarchy", "")


def require(package: str) -> ModuleType:
    """An optional package, or an ImportError that names the extra to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"ONNX needs {package}: pip install 'vil[export]'") from error


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of the tracers and converters, who warn of their own code."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
