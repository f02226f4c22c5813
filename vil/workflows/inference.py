"""A model for inference: the one answer to which weights, which transform and which classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import WeightsEnum
from yacs.config import CfgNode

from vil.builders.attention_backend import select_attention_backends
from vil.builders.device import configure_device
from vil.builders.model import find_weights, prepare_for_evaluation
from vil.engine.distributed import DistInfo
from vil.models.registry import ARCHS
from vil.pretrained.catalog import DIGITS, get_model_weights
from vil.tasks import task_for
from vil.tasks.base import Task
from vil.utils.errors import CheckpointError
from vil.utils.global_state import preserve_global_state
from vil.workflows.configure import Options, Overrides, as_options, run_config, weights_config


@dataclass
class InferenceModel:
    """A model with its weights, in eval mode on `task.device`.

    transform: from a PIL image to the tensor that the model takes. classes: the names of what it
    predicts. report: which weights were loaded, and what became of their keys. cfg: its config.
    """

    model: nn.Module
    transform: Callable[[Image.Image], Tensor]
    classes: Sequence[str]
    task: Task
    report: str
    cfg: CfgNode


def load_for_inference(
    source: str | Path | WeightsEnum,
    overrides: Overrides | None = None,
    *,
    checkpoint: str = "best",
) -> InferenceModel:
    """Load a model from the folder of a run, a self-describing file of weights, or a name.

    source: "runs/nano"; a file of `vil convert` or `vil.save_pretrained`; a name of
    `vil.list_models()`, which stands for its default weights; or a member of a weights enum.
    overrides: {"DEVICE": "cpu"}. checkpoint: of a run, "best" or "last".
    Raises ConfigError for any other source, CheckpointError for damaged weights.
    """
    words = as_options(overrides)
    if str(source) in ARCHS:
        source = get_model_weights(str(source)).DEFAULT
    if isinstance(source, WeightsEnum):
        recipe = source.meta["recipe"].removeprefix("configs/")
        name = f"MODEL.MODEL_PATH={type(source).__name__}.{source.name}"
        found = weights_config(recipe, Options([name, *words]))
        found = found._replace(class_names=source.meta["categories"] or ())
    elif Path(source, "config.yaml").is_file():
        found = run_config(source, Options(words), checkpoint=checkpoint)
    else:
        found = weights_config(None, Options([f"MODEL.MODEL_PATH={source}", *words]))
    with preserve_global_state():
        return load_model(found.cfg, found.class_names)


def shipped_weights() -> tuple[str, list[str]]:
    """The config file of the weights that ship with the package, and the option that loads them."""
    recipe = DIGITS.meta["recipe"].removeprefix("configs/")
    return recipe, [f"MODEL.MODEL_PATH={DIGITS.url}"]


def load_model(cfg: CfgNode, class_names: Sequence[str] = ()) -> InferenceModel:
    """Build the config's model, load its weights and move it to its device, in eval mode.

    class_names: those that the weights were trained on; numbers without them. Raises
    CheckpointError where the model, or its head, would stay as it was initialized.
    """
    refuse_random_weights(cfg)
    task, model, report = load_for_evaluation(cfg, configure_device(cfg), DistInfo())
    names = list(class_names) or [str(number) for number in range(cfg.DATA.NUM_CLASSES)]
    task.class_names = names
    return InferenceModel(model.eval(), task.preprocess, names, task, report, cfg)


def load_for_evaluation(
    cfg: CfgNode, device: torch.device, dist: DistInfo
) -> tuple[Task, nn.Module, str]:
    """The config's task, its model on its device, and which weights it has."""
    task = task_for(cfg, device)
    model, report = build_with_weights(cfg, task)
    model = prepare_for_evaluation(cfg, task.inference_model(model), device)
    select_attention_backends(model, cfg, device, dist, training=False)
    return task, model, report


def build_with_weights(cfg: CfgNode, task: Task) -> tuple[nn.Module, str]:
    """The model with its weights on the CPU, and a line that says which weights."""
    model = task.build_model(load_pretrained=not cfg.MODEL.MODEL_PATH)
    if not cfg.MODEL.MODEL_PATH:
        return model, f"published weights of {cfg.MODEL.ARCH}"
    path = find_weights(cfg.MODEL.MODEL_PATH, cfg.DATA.DATA_DIR)
    return model, f"weights of {path}: {task.load_weights(model, path, strict=True)}"


def refuse_random_weights(cfg: CfgNode) -> None:
    """Raise CheckpointError where the model, or its head, would stay as it was initialized."""
    if not (cfg.MODEL.MODEL_PATH or cfg.MODEL.PRETRAINED):
        raise CheckpointError("evaluation needs weights: set MODEL.MODEL_PATH, or give --run DIR")
    if cfg.FINETUNE.HEAD == "new":
        raise CheckpointError(
            "FINETUNE.HEAD new would evaluate a random head: keep it, or rows:FILE"
        )
