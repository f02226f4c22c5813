"""Compile models ahead of time with AOTInductor.

A compiled package contains the weights and machine code, so C++ and Python programs need no Python
code of the model. The package runs only on CPUs with the vector instructions of the CPU on which it
was compiled.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from vil.export.trace import ExportSpec, as_export_error, trace_model


def check_compiler() -> None:
    """Raise ValueError if the C++ compiler that AOTInductor needs is missing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "AOTInductor needs a C++ compiler: install g++, or set CXX to a compiler"
        ) from error


def write_package(
    model: nn.Module, spec: ExportSpec, path: Path, metadata: Mapping[str, str]
) -> None:
    """Compile a model to an AOTInductor package: images (B, channels, H, W) to logits (B, classes).

    path: file to write, must end with .pt2. metadata: entries to store in the package. Raises
    ValueError if the model cannot be compiled.
    """
    program = trace_model(model, spec)
    options = {"aot_inductor.metadata": dict(metadata), "freezing": True}
    with torch.no_grad(), as_export_error("an AOTInductor package"):
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=options
        )
