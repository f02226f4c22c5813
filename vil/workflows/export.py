"""Export a trained model to files, and compare the metrics of the files and of the model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from yacs.config import CfgNode

from vil.data.build import read_options
from vil.data.datasets.image_list import ImageList
from vil.data.workers import worker_errors
from vil.export import quantize_linears
from vil.export.exporter import DYNAMIC, SUFFIXES
from vil.export.onnx import require_onnx
from vil.tasks import TASKS, refuse_without, task_for, with_num_classes
from vil.tasks.base import Task
from vil.tasks.image.build import card_transform
from vil.tasks.weight_files import find_weights
from vil.utils.errors import ConfigError, os_error_as
from vil.utils.output_paths import int8_file
from vil.workflows.calibration import describe_unused
from vil.workflows.execution import Execution, execution_of
from vil.workflows.inference import build_with_weights, open_test_sets, refuse_random_weights
from vil.workflows.prepare import move_to_device
from vil.workflows.quantization_images import find_calibration_images, iter_calibration_batches


class ExportResult(NamedTuple):
    """Result of an export."""

    report: str  # text that states which weights were loaded
    # per tested input shape: largest difference between the outputs of the file and of the model
    differences: list[Any]
    files: list[Path]  # the exported file and, if requested, a second file with int8 linear layers
    num_int8: int  # number of int8 layers; 0 if there is no second file
    model: nn.Module  # on the CPU
    task: Task
    execution: Execution  # of the model


def export_config(
    cfg: CfgNode,
    out: str | Path,
    class_names: Sequence[str] = (),
    *,
    int8: bool = False,
    calibration: str | Path | None = None,
    check: bool = False,
    size: tuple[int, int] | None = None,
    dynamic: Sequence[str] | None = None,
    **options,
) -> ExportResult:
    """Load the config's model and weights, and export the model to the file `out`.

    int8: whether to also write a second file with int8 linear layers. calibration: folder of images
    from which the input ranges of the int8 layers are computed; None to compute the ranges in each
    call (dynamic quantization). check: whether `compare_on_test_sets` will be called. options: the
    arguments `format`, `size`, `dynamic` and `opset` of `vil.export.export_model`; None for the
    task's defaults. Raises ConfigError if the model cannot be exported, and ExportError if the
    outputs of the file and of the model differ.
    """
    why = "vil export needs a model with the same number of outputs for every image"
    refuse_without(cfg.TASK, "export", why)
    if int8:
        why = "--int8 needs images of one size: leave it out"
        refuse_without(cfg.TASK, "resizes_to_image_size", why)
    if check:
        why = "leave out --check: its files cannot be evaluated"
        refuse_without(cfg.TASK, "load_exported", why)
    if TASKS.entry(cfg.TASK).load().resizes_to_image_size:
        trained = (cfg.INPUT.IMAGE_SIZE,) * 2
        size, dynamic = size or trained, DYNAMIC if dynamic is None else dynamic
        if check and "size" not in dynamic and tuple(size) != trained:
            raise ConfigError(
                f"--check: the test images have {cfg.INPUT.IMAGE_SIZE} x {cfg.INPUT.IMAGE_SIZE} "
                "pixels (INPUT.IMAGE_SIZE), but the exported file only takes "
                f"{'x'.join(map(str, size))}"
            )
    path, head = cfg.MODEL.MODEL_PATH, cfg.FINETUNE.HEAD
    refuse_random_weights(path or cfg.MODEL.PRETRAINED, head)
    cfg, device = with_num_classes(cfg), torch.device("cpu")
    if (options.get("format") or SUFFIXES.get(Path(out).suffix)) == "onnx":
        with _as_config_error(Path(out)):
            require_onnx()
    weights = find_weights(path, cfg.DATA.DATA_DIR) if path else cfg.MODEL.ARCH
    task = task_for(cfg, device)
    model, report = build_with_weights(task, weights, head, class_names)
    if unused := describe_unused(path, cfg.DATA.DATA_DIR, head):
        report = f"{report}\n{unused}"
    images = None
    if calibration is not None:
        found = find_calibration_images(calibration, task.class_names, cfg.INPUT.CHANNELS)
        images = ImageList(found, **read_options(cfg))
        for _ in iter_calibration_batches(task, images):
            pass  # raise the error for too few readable images before the export, which is slow
    notes = {"task": cfg.TASK, "model": cfg.MODEL.ARCH, **card_transform(cfg)}
    notes |= {"classes": list(task.class_names)} if task.class_names else {}
    texts = {key: json.dumps(x) if type(x) is list else str(x) for key, x in notes.items()}
    files, count = [out := Path(out)], 0
    with _as_config_error(out):
        options |= dict(size=size, dynamic=dynamic)
        differences = task.export(model, out, metadata=texts, **options)
    if int8:
        files.append(int8_file(out))
        batches = iter_calibration_batches(task, images) if images else None
        with _as_config_error(files[-1]):
            count = quantize_linears(out, files[-1], batches)
    execution = execution_of(cfg, device)
    return ExportResult(report, differences, files, count, model, task, execution)


@contextmanager
def _as_config_error(out: Path) -> Iterator[None]:
    """Convert a ValueError, ImportError or OSError in a `with` block to ConfigError. out: the file
    that the block writes, which the message for an OSError names."""
    try:
        with os_error_as(ConfigError, f"--out {out}"):
            yield
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error


def compare_on_test_sets(
    result: ExportResult, format: str
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Evaluate the model, then each exported file, on the config's test sets on the CPU.

    format: format of the files, such as "onnx". Yields (test set, name, metrics), where `name` is
    "model" or the name of a file.
    """
    task = result.task
    files = {file.name: task.load_exported(file, format) for file in result.files}
    with worker_errors():
        open_test_sets(task)
        network = move_to_device(result.model, result.execution, training=False)
        for name, model in {"model": network, **files}.items():
            for test, metrics in task.evaluate(model).items():
                yield test, name, metrics
