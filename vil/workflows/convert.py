"""Convert a checkpoint to a self-describing safetensors file."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from yacs.config import CfgNode

from vil.config.defaults import KEYS, leaves
from vil.export.trace import find_msvit
from vil.pretrained.catalog import get_notes, get_weight
from vil.pretrained.get_model import get_model
from vil.pretrained.hub import CONFIG, WEIGHTS, save_pretrained
from vil.pretrained.infer_arch import infer_arch
from vil.pretrained.load_weights import load_weights, select_classes
from vil.pretrained.model_card import build_from_card, make_model_card
from vil.pretrained.state_dict_io import read_metadata, read_weights, write_weights
from vil.tasks import TASKS, refuse_without, task_for
from vil.tasks.image.build import card_transform
from vil.tasks.weight_files import find_weights, recorded_values
from vil.utils.errors import ConfigError
from vil.utils.output_paths import output_file, refuse_run_files
from vil.workflows.calibration import describe_unused
from vil.workflows.configure import read_class_file
from vil.workflows.source_weights import recorded_classes


def convert(
    source: str | Path,
    target: str | Path,
    cfg: CfgNode | None = None,
    *,
    model_name: str | None = None,
    class_names: Sequence[str] = (),
    class_file: str | None = None,
    rule: str | None = None,
) -> list[str]:
    """Convert a checkpoint to a safetensors file or folder that also describes its model.

    source: path of the checkpoint. If `cfg` is given, its MODEL.MODEL_PATH is used instead.
    target: path that ends in .safetensors, or a folder.
    cfg: config of the model.
    model_name: name of the model, if `cfg` is None. If both are None, the model is the one that the
    checkpoint describes or, without a description, the one inferred from the tensor shapes.
    class_names: names of the model's classes; by default those in the checkpoint's description.
    class_file: file with one class name per line, an alternative to `class_names`.
    rule: how to resize position embeddings, a value of FINETUNE.RESIZE.

    Returns lines of text that state which model was inferred, and which weights were loaded,
    resized or ignored. Raises ConfigError for invalid arguments, and CheckpointError if the
    checkpoint cannot be read or does not fit the model.
    """
    if not str(target):
        raise ConfigError("TARGET is an empty path: expected a .safetensors file or a folder")
    target = Path(target)
    if target.suffix in (".pth", ".pt", ".bin", ".onnx"):
        raise ConfigError(f"TARGET {target}: expected a .safetensors file or a folder")
    if cfg is not None:
        why = "a model card cannot describe it: predict from the run's folder"
        refuse_without(cfg.TASK, "resizes_to_image_size", why)
    path = find_weights(str(source) if cfg is None else cfg.MODEL.MODEL_PATH, "")
    path = path / "model.safetensors" if path.is_dir() else path
    if target.suffix == ".safetensors":
        output_file(target, "TARGET", inputs=[path])
    else:
        check_folder(target, path)
    known, state = read_metadata(path) or {}, read_weights(path)
    if cfg is None:
        model, lines = _build(model_name, str(source), known, state)
        if model_name and "." in model_name:
            notes = get_notes(get_weight(model_name))
            known = notes | {key: value for key, value in known.items() if value}
    else:
        model, lines = find_msvit(task_for(cfg, torch.device("cpu")).build_model()), []
        if model is None:
            raise ConfigError(
                f"MODEL.ARCH {cfg.MODEL.ARCH!r} cannot be converted: expected msvit, a model of vil"
            )
    head, default = (cfg.FINETUNE.HEAD, cfg.FINETUNE.RESIZE) if cfg else ("keep", "linear")
    if head == "new":
        raise ConfigError(
            "FINETUNE.HEAD is 'new', which would write a random head: set FINETUNE.HEAD to 'keep' "
            "or 'rows:FILE'"
        )
    report = load_weights(model, state, head=head, rule=rule or default, convert=True)
    lines.append(f"weights of {path}: {report}")
    lines += filter(None, [describe_unused(str(path), "", head)])
    names = list(class_names) or recorded_classes(path, head)
    names = names or select_classes(head, known.get("classes"))
    has_head = isinstance(model.head, nn.Linear)
    if class_file:
        names = read_class_file(class_file, getattr(model.head, "out_features", 0))
    notes = {
        "transform": card_transform(cfg) if cfg else known.get("transform"),
        "classes": names if has_head else None,
        "task": describe_task(cfg, path, head) if cfg and has_head else known.get("task"),
    }
    if target.suffix == ".safetensors":
        write_weights(target, model.state_dict(), make_model_card(model, **notes, source=path))
    else:
        save_pretrained(model, target, **notes, source=path)
    return lines


def describe_task(cfg: CfgNode, weights: Path, head: str) -> dict | None:
    """Return the task of a config for a model card, see `make_model_card`, with the values that
    training determined. They are those recorded with the weights, in the order of the head, and
    otherwise those of the config. Returns None for classification, the default of TASK.

    head: value of FINETUNE.HEAD. Raises ConfigError if the values are not known.
    """
    default = KEYS["TASK"].default
    if default == cfg.TASK:
        return None
    values, learned = leaves(cfg), TASKS.entry(cfg.TASK).load().learned_keys
    recorded = recorded_values(weights, learned)
    settings = {
        key: select_classes(head, recorded.get(key)) or list(values[key]) for key in learned
    }
    if unknown := [key for key, value in settings.items() if not value]:
        raise ConfigError(f"{unknown[0]} is not recorded with {weights}: set it as in training")
    return {"name": cfg.TASK, "settings": settings}


def check_folder(target: Path, source: Path) -> None:
    """Raise ConfigError if `save_pretrained` must not write to a folder: it belongs to a run,
    contains the weights `source`, or has weights or a config.json that are not vil's."""
    weights = target / WEIGHTS
    refuse_run_files(target, "TARGET")
    if not target.is_dir():
        return
    output_file(weights, "TARGET", inputs=[source], beside=[target / CONFIG])
    if weights.exists() and read_metadata(weights) is None:
        raise ConfigError(f"TARGET {target} has another {WEIGHTS}: choose another folder")


def _build(
    model_name: str | None, source: str, known: dict, state: dict
) -> tuple[nn.Module, list[str]]:
    """Build the model of a checkpoint. Returns (model, lines).

    The model is defined by its name `model_name` or, without a name, by the checkpoint's
    description `known`. Without both, it is inferred from the tensor shapes in `state`, and `lines`
    state which model it is. source: the checkpoint's path, for messages.
    """
    if any(name.startswith("backbone.body.") for name in state):
        raise ConfigError(
            f"{source} is a detector, which cannot be converted: set MODEL.MODEL_PATH to {source} "
            "itself"
        )
    if model_name:
        return _named(model_name), []
    if known:
        return build_from_card(known), []
    name, model = infer_arch(state)
    windows = ", ".join(str(spec.attn_size) for spec in model.specs)
    lines = [f"inferred model: {name}, {model.settings['img_size']} px, windows {windows}"]
    if any(spec.absolute for spec in model.specs):
        lines += [
            "  (the window sizes are defaults: weights with absolute positions do not reveal them)"
        ]
    return model, lines


def _named(model_name: str) -> nn.Module:
    try:
        name, _, member = model_name.partition(".")
        settings = get_weight(model_name).meta["build"] if member else {}
        return get_model(name.removesuffix("_Weights").lower() if member else name, **settings)
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from None
