"""Load exported files as modules, so that they can be evaluated like any other model."""

import importlib
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vil.utils.errors import CheckpointError

METADATA = "metadata.json"  # entry of a torch.export program that stores vil's metadata
PACKAGE = "/data/aotinductor/"  # part of the names of the entries of an AOTInductor package


class ExportedModel(nn.Module):
    """A module that runs an exported file. It maps float32 images (B, channels, H, W) on the CPU to
    logits (B, classes).

    run: function that runs the file on images. metadata: the file's metadata, which is described in
    docs/guides/export.md.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], metadata: Mapping[str, str]) -> None:
        super().__init__()
        self.run, self.metadata = run, dict(metadata)

    def forward(self, images: Tensor) -> Tensor:
        """Map float32 images (B, channels, H, W) on the CPU to logits (B, classes)."""
        if not len(images):  # programs of torch.export need an image
            return self(images.new_zeros(1, *images.shape[1:]))[:0]
        return self.run(images.detach().contiguous())


def load_exported(path: str | Path, format: str | None = None) -> ExportedModel:
    """Load a file written by `export_model` as a module that maps images to logits.

    format: "onnx", "torch" or "aoti", by default detected from the file's name and content. ONNX
    files run in onnxruntime on the CPU, with torch's number of threads. Raises CheckpointError if
    there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no exported file at {path}: check the path")
    if format is None:
        format = "onnx" if path.suffix == ".onnx" else "aoti" if _is_package(path) else "torch"
    return {"onnx": _load_onnx, "torch": _load_program, "aoti": _load_package}[format](path)


def _is_package(path: Path) -> bool:
    """Return whether a file is an AOTInductor package."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(PACKAGE in name for name in archive.namelist())


def _load_package(path: Path) -> ExportedModel:
    from torch._inductor import aoti_load_package

    with quiet():
        package = aoti_load_package(str(path))

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            return package(images)

    return ExportedModel(run, package.get_metadata())


def open_session(path: Path) -> Any:
    """Open an ONNX file as a session of onnxruntime on the CPU, with torch's number of threads."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # only errors: warnings are about onnxruntime's optimizer
    # between calls, onnxruntime's threads must not compete with torch's
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _load_onnx(path: Path) -> ExportedModel:
    session = open_session(path)
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: images.numpy()})[0])

    return ExportedModel(run, session.get_modelmeta().custom_metadata_map)


def _load_program(path: Path) -> ExportedModel:
    files = {METADATA: ""}
    with quiet():
        module = torch.export.load(path, extra_files=files).module()
    # the bound method, not the module: modules of torch.export raise in train() and eval()
    return ExportedModel(module.forward, json.loads(files[METADATA] or "{}"))


def require(package: str) -> ModuleType:
    """Import a package that ONNX export needs. If it is missing, raises ImportError with the pip
    command to run."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"ONNX needs {package}: pip install 'vil[export]'") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Python warnings and log messages up to WARNING in a `with` block. Used around torch's
    and onnxruntime's exporters, which warn about their own code."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
