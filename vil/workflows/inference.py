"""Load a trained model for inference, with its input transform and class names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset
from torchvision.models import WeightsEnum
from yacs.config import CfgNode

from vil.config import override
from vil.engine.build import configure_device
from vil.engine.distributed import DistInfo
from vil.integrations.optimize import optimize_for_inference
from vil.models.registry import ARCHS
from vil.models.vision_longformer import MsViT
from vil.pretrained.catalog import DIGITS, get_model_weights
from vil.pretrained.load_weights import select_classes
from vil.pretrained.state_dict_io import POINTERS
from vil.tasks import refuse_without, task_for, with_num_classes
from vil.tasks.base import Task
from vil.tasks.weight_files import find_weights
from vil.utils.errors import CheckpointError, ConfigError, in_python_words
from vil.utils.global_state import preserve_global_state
from vil.utils.machine import free_bytes, gigabytes
from vil.workflows.attention_backend import select_attention_backends
from vil.workflows.calibration import apply_stored, find_checkpoint
from vil.workflows.configure import (
    Options,
    Overrides,
    as_options,
    check_source,
    source_config,
    weights_config,
)
from vil.workflows.execution import execution_of
from vil.workflows.prepare import prepare_for_evaluation
from vil.workflows.source_weights import recorded_classes

MAPS = 8  # feature maps of the first stage that a forward pass has in memory at once


@dataclass
class InferenceModel:
    """A trained model in eval mode on `task.device`, with its transform, class names and config.

    transform: converts an RGB PIL image to an input tensor.
    task: runs the model and decodes its outputs.
    report: text that states which weights were loaded, and which calibration of the probabilities
    is applied.
    """

    model: nn.Module
    transform: Callable[[Image.Image], Tensor]
    classes: Sequence[str]
    task: Task
    report: str
    cfg: CfgNode


@in_python_words
def load_for_inference(
    source: str | Path | WeightsEnum,
    overrides: Overrides | None = None,
    *,
    checkpoint: str = "best",
    needs_head: bool = True,
) -> InferenceModel:
    """Load a trained model from a run's folder, a self-describing weight file, or by name.

    source: the folder of a run, a weight file written by `vil convert` or `vil.save_pretrained`, a
    name from `vil.list_models()`, or a member of a weights enum. A name selects the model's default
    weights, unless it is also the folder of a run.
    overrides: changes to the config, such as {"DEVICE": "cpu"}.
    checkpoint: for a run, "best" or "last".
    needs_head: False for features only, such as those of a weight file without a head.
    Raises CheckpointError if the weights are missing or corrupt.
    """
    words = as_options(overrides)
    if not isinstance(source, WeightsEnum):
        check_source(source)
    is_run = not isinstance(source, WeightsEnum) and Path(source, "config.yaml").is_file()
    if str(source) in ARCHS and not is_run:
        source = get_model_weights(str(source)).DEFAULT
    if isinstance(source, WeightsEnum):
        recipe = source.meta["recipe"].removeprefix("configs/")
        name = f"MODEL.MODEL_PATH={type(source).__name__}.{source.name}"
        found = weights_config(recipe, Options([name, *words]))
        names = select_classes(found.cfg.FINETUNE.HEAD, source.meta["categories"])
        found = found._replace(class_names=names or ())
    else:
        found = source_config(source, Options(words), checkpoint=checkpoint)
    with preserve_global_state():
        return load_model(found.cfg, found.class_names, needs_head=needs_head)


def as_inference_model(
    source: str | Path | WeightsEnum | InferenceModel,
    overrides: Overrides | None = None,
    *,
    needs_head: bool = True,
) -> InferenceModel:
    """Load the model of `source`, unless `source` is an InferenceModel, which is returned as it is.
    Raises ConfigError if overrides are given for an InferenceModel. needs_head: see
    `load_for_inference`."""
    if not isinstance(source, InferenceModel):
        return load_for_inference(source, overrides, needs_head=needs_head)
    if overrides:
        raise ConfigError(
            "overrides do not change a loaded model: pass the overrides to vil.load_for_inference"
        )
    return source


def shipped_weights() -> tuple[str, list[str]]:
    """Return (config, options) for the weights that are included in the package: the name of a
    packaged config file, and config options that load the weights."""
    recipe = DIGITS.meta["recipe"].removeprefix("configs/")
    return recipe, [f"MODEL.MODEL_PATH={DIGITS.url}"]


def load_model(
    cfg: CfgNode, class_names: Sequence[str] = (), *, needs_head: bool = True
) -> InferenceModel:
    """Build the config's model, load its weights, and move it to its device in eval mode.

    class_names: by default the names recorded with the weights, or else numbers. needs_head:
    whether the caller uses the head. Raises CheckpointError if the config sets no weights. With
    `needs_head`, also raises it if the config sets a new random head (FINETUNE.HEAD new).
    """
    head = cfg.FINETUNE.HEAD if needs_head else "keep"
    refuse_random_weights(cfg.MODEL.MODEL_PATH or cfg.MODEL.PRETRAINED, head)
    cfg = with_num_classes(cfg)
    if not needs_head:  # the file may have none
        cfg = override(cfg, ["FINETUNE.HEAD=new"])
    device = configure_device(cfg)
    task, model, report, calibration = load_for_evaluation(cfg, device, DistInfo(), class_names)
    report = f"{report}; {calibration}" if calibration else report
    names = task.class_names or [str(number) for number in range(cfg.DATA.NUM_CLASSES)]
    task.class_names = names
    return InferenceModel(model.eval(), task.preprocess, names, task, report, cfg)


class Loaded(NamedTuple):
    """Result of `load_for_evaluation`: a task, and a model with trained weights.

    report: text that states which weights were loaded. calibration: text that states which stored
    calibration of the probabilities is applied, or "".
    """

    task: Task
    model: nn.Module
    report: str
    calibration: str


def load_for_evaluation(
    cfg: CfgNode,
    device: torch.device,
    dist: DistInfo,
    class_names: Sequence[str] = (),
    *,
    calibrated: bool = True,
) -> Loaded:
    """Build the config's task and model, load the weights, and select attention backends.

    class_names: by default the names recorded with the weights. calibrated: for a checkpoint of a
    run, whether to apply the stored calibration of its probabilities.
    """
    path, head = cfg.MODEL.MODEL_PATH, cfg.FINETUNE.HEAD
    task = task_for(cfg, device)
    try:
        weights = find_weights(path, cfg.DATA.DATA_DIR) if path else cfg.MODEL.ARCH
        model, report = build_with_weights(task, weights, head, class_names)
    except CheckpointError:
        if Path(path).name not in POINTERS:
            raise
        # a run that still trains has removed the checkpoint: load the new one
        weights = find_weights(path, cfg.DATA.DATA_DIR)
        model, report = build_with_weights(task, weights, head, class_names)
    execution = execution_of(cfg, device, dist.world)
    model = prepare_for_evaluation(task.inference_model(model), execution)
    fast = cfg.EVAL.FAST
    if fast:
        why = "--fast (EVAL.FAST) needs images of one size: leave it out"
        refuse_without(cfg.TASK, "resizes_to_image_size", why)
    select_attention_backends(model, execution, dist, training=False)
    if fast:
        dtype, task.amp_dtype = task.amp_dtype or torch.float32, None
        model = optimize_for_inference(model, dtype=dtype, compile=cfg.MODEL.COMPILE)
        report = f"{report}; optimized for inference in {str(dtype).removeprefix('torch.')}"
    calibration = ""
    if calibrated:
        calibration = apply_stored(find_checkpoint(path, cfg.DATA.DATA_DIR, head), task)
    return Loaded(task, model, report, calibration)


def build_with_weights(
    task: Task, weights: Path | str, head: str, class_names: Sequence[str] = ()
) -> tuple[nn.Module, str]:
    """Build the model on the CPU, load its weights, and set the class names of the task. Returns
    (model, report), where the report states which weights were loaded.

    weights: a weight file or checkpoint, or the name of an architecture with published weights.
    head: value of FINETUNE.HEAD. class_names: by default the names recorded with the weights.
    """
    task.class_names = list(class_names)
    if isinstance(weights, str):
        return task.build_model(load_pretrained=True), f"published weights of {weights}"
    task.class_names = task.class_names or recorded_classes(weights, head)
    model = task.build_model()
    return model, f"weights of {weights}: {task.load_weights(model, weights, strict=True)}"


def is_finite(values: Any) -> bool:
    """Return whether all numbers are finite. values: a tensor, a dataclass of tensors, or nested
    lists of them, such as a model's output for one image."""
    leaves = tree_leaves(vars(values) if is_dataclass(values) else values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # a sum is finite if its terms are, and takes a fraction of the time of `isfinite` on each
    types = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    return all(tensor.sum(dtype=dtype).isfinite() for tensor, dtype in zip(tensors, types))


def check_memory(model: InferenceModel) -> None:
    """Raise ConfigError if one image of INPUT.IMAGE_SIZE pixels takes more memory than is free: the
    image and MAPS feature maps of the first stage, in float32."""
    side = model.cfg.INPUT.IMAGE_SIZE
    size = model.cfg.INPUT.CHANNELS * side**2 * 4
    if network := next((m for m in model.model.modules() if isinstance(m, MsViT)), None):
        stage = network.specs[0]
        size += MAPS * stage.dim * (side // stage.patch) ** 2 * 4
    if model.task.resizes_to_image_size and size > (limit := free_bytes(model.task.device)):
        raise ConfigError(
            f"INPUT.IMAGE_SIZE {side}: one image takes {gigabytes(size)}, more than the "
            f"{gigabytes(limit)} of free memory: lower it, or add --stream to vil predict"
        )


def open_test_sets(
    task: Task, dist: DistInfo | None = None, part: str = "test", **options: Any
) -> dict[str, Dataset]:
    """Open the test sets of a task, and build its data loaders for them.

    part: "test" for the sets in DATA.TEST; "val" for those in DATA.VAL or, if DATA.VAL is empty, in
    DATA.TEST. options: more arguments of `Task.test_loaders`. Returns {name: dataset}.
    """
    # A task without DATA.VAL may be that of a plug-in, whose `test_loaders` may not have `part`.
    own = {"part": part} if task.has_splits else {}
    loaders = task.test_loaders(dist or DistInfo(), **own, **options)
    return {name: loader.dataset for name, loader in loaders.items()}


def refuse_random_weights(weights: str | bool, head: str = "keep") -> None:
    """Raise CheckpointError if there are no trained weights, or if the head is random.

    weights: the value of MODEL.MODEL_PATH or, if it is empty, of MODEL.PRETRAINED. head: the value
    of FINETUNE.HEAD; "keep" if the head is not used.
    """
    if not weights:
        raise CheckpointError(
            "the model has no trained weights: set MODEL.MODEL_PATH or give --run DIR"
        )
    if head == "new":
        raise CheckpointError(
            "FINETUNE.HEAD is 'new', which uses a random head: set FINETUNE.HEAD to 'keep' or "
            "'rows:FILE'"
        )
