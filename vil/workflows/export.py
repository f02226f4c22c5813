"""Export a trained model to files, and compare the metrics of the files and of the model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from yacs.config import CfgNode

from vil.data.workers import worker_errors
from vil.export import export_model, load_exported, quantize_linears
from vil.export.exporter import SUFFIXES
from vil.export.onnx import require_onnx
from vil.tasks import refuse_without, task_for, with_num_classes
from vil.tasks.image.build import transform_settings
from vil.utils.errors import ConfigError, os_error_as
from vil.workflows.inference import (
    build_with_weights,
    open_test_sets,
    recorded_classes,
    refuse_random_weights,
)
from vil.workflows.prepare import move_to_device
from vil.workflows.quantization_images import find_calibration_images, iter_calibration_batches


class ExportResult(NamedTuple):
    """Result of an export."""

    report: str  # text that states which weights were loaded
    # per tested input shape: largest difference between the logits of the file and of the model
    differences: list[Any]
    files: list[Path]  # the exported file and, if requested, a second file with int8 linear layers
    num_int8: int  # number of int8 layers; 0 if there is no second file
    model: nn.Module  # on the CPU


def export_config(
    cfg: CfgNode,
    out: str | Path,
    class_names: Sequence[str] = (),
    *,
    int8: bool = False,
    calibration: str | Path | None = None,
    **options,
) -> ExportResult:
    """Load the config's model and weights, and export the model to the file `out`.

    int8: whether to also write a second file with int8 linear layers. calibration: folder of images
    from which the input ranges of the int8 layers are computed; None to compute the ranges in each
    call (dynamic quantization). options: the arguments `format`, `size`, `dynamic` and `opset` of
    `vil.export.export_model`. Raises ConfigError if the model cannot be exported, and ExportError
    if the outputs of the file and of the model differ.
    """
    refuse_without(cfg.TASK, "predicts_classes", "vil export supports only classifiers")
    names, images = list(class_names) or recorded_classes(cfg), []
    if calibration is not None:
        images = find_calibration_images(calibration, names, cfg.INPUT.CHANNELS)
    cfg = with_num_classes(cfg)
    refuse_random_weights(cfg)
    if (options.get("format") or SUFFIXES.get(Path(out).suffix)) == "onnx":
        with _as_config_error(Path(out)):
            require_onnx()
    task = task_for(cfg, torch.device("cpu"))
    for _ in iter_calibration_batches(cfg, task, images) if images else ():
        pass  # raise the error for too few readable images before the export, which is slow
    model, report = build_with_weights(cfg, task)
    files, count = [out := Path(out)], 0
    with _as_config_error(out):
        notes = metadata(cfg, names)
        differences = export_model(model, out, metadata=notes, **options)
    if int8:
        files.append(out.with_name(f"{out.stem}.int8{out.suffix or '.onnx'}"))
        batches = iter_calibration_batches(cfg, task, images) if images else None
        with _as_config_error(files[-1]):
            count = quantize_linears(out, files[-1], batches)
    return ExportResult(report, differences, files, count, model)


@contextmanager
def _as_config_error(out: Path) -> Iterator[None]:
    """Convert a ValueError, ImportError or OSError in a `with` block to ConfigError. out: the file
    that the block writes, which the message for an OSError names."""
    try:
        with os_error_as(ConfigError, f"--out {out}"):
            yield
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error


def metadata(cfg: CfgNode, class_names: Sequence[str]) -> dict[str, str]:
    """Return the metadata of an exported file, {name: text}: model, input transform and class
    names."""
    notes = {"model": cfg.MODEL.ARCH, **transform_settings(cfg)}
    notes |= {"classes": list(class_names)} if class_names else {}
    return {key: json.dumps(x) if type(x) is list else str(x) for key, x in notes.items()}


def compare_on_test_sets(
    cfg: CfgNode, result: ExportResult, format: str, class_names: Sequence[str] = ()
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Evaluate the model, then each exported file, on the config's test sets on the CPU.

    format: format of the files, such as "onnx". class_names: by default those recorded with the
    weights. Yields (test set, name, metrics), where `name` is "model" or the name of a file.
    """
    files = {file.name: load_exported(file, format) for file in result.files}
    with worker_errors():
        cfg, device = with_num_classes(cfg), torch.device("cpu")
        task = task_for(cfg, device)
        task.class_names = list(class_names) or recorded_classes(cfg)
        open_test_sets(task, cfg)
        models = {"model": move_to_device(cfg, result.model, device, training=False), **files}
        for name, model in models.items():
            for test, metrics in task.evaluate(model).items():
                yield test, name, metrics
