"""Write models as torch.export programs (.pt2)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from vil.export.runtime import METADATA
from vil.export.trace import trace_model


def write_program(
    model: nn.Module,
    size: tuple[int, int],
    dynamic: Sequence[str],
    path: Path,
    opset: None,
    metadata: Mapping[str, str],
) -> None:
    """Write a program: images (B, c, H, W) -> logits (B, K). See `export_model`."""
    program = trace_model(model, size, dynamic)
    torch.export.save(program, path, extra_files={METADATA: json.dumps(dict(metadata))})
