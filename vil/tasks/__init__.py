"""The registry of tasks. Each task of this package has its own folder.

A registry entry names the task's class and may have these attributes, its "facts":

declares    config sections, keys and conflicts, in the format of vil/config/defaults
noun        what messages call a model of the task, such as "detector"
implied_by  config key that selects the task if it is set and TASK is not
hint        part of a message: how to write a config for the task
commands    {command: one-line help} of the task's commands: "detect train", "detect check"
spellings   {alias of a general command: example command lines}: `detect train` is `vil train`
learned     config keys that are empty until the training data determine them
metrics     {metric: (label, unit, higher is better)} that EVAL.METRIC may name, the default first
formats     choices of `vil predict --format`, the default first
complete    those of `formats` that need every class, so that --top and --threshold do not apply
flags       {flag of `vil predict`: config key that the flag sets}
defaults    {config key: default value in `vil predict`}
lacks       {workflow: why the task does not support it}
"""

from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.tasks import classification, detection, multilabel, regression
from vil.utils.errors import ConfigError, DataError
from vil.utils.registry import Entry, Registry

TASKS = Registry("task", check="vil.tasks.base:check_task")
TASKS.add("classification", **classification.ENTRY)
TASKS.add("detection", **detection.ENTRY)
TASKS.add("multilabel", **multilabel.ENTRY)
TASKS.add("regression", **regression.ENTRY)


def register_task(name: str, task: Any, *, about: str = "", **facts: Any) -> None:
    """Register a task as the choice `name` of the config key TASK.

    task: a subclass of `vil.tasks.base.Task`, called as task(cfg, device), or its path
    "module:Class". about: a one-line description. facts: see the top of this file. `keys`,
    also allowed, is {argument: `vil.utils.registry.Key`} and adds config keys. Raises ValueError if
    the name is taken or if the class lacks a required method.
    """
    TASKS.register(name, task, about, **facts)


def task_entry(cfg: CfgNode) -> Entry:
    """Return the registry entry of the task that a config selects."""
    return TASKS.entry(cfg.TASK)


def task_for(cfg: CfgNode, device) -> "Task":  # noqa: F821 - vil.tasks.base needs torch
    """Build the task that a config selects, as task_class(cfg, device). Raises ConfigError if
    DATA.NUM_CLASSES is auto; `with_num_classes` replaces it by a number."""
    if cfg.DATA.NUM_CLASSES == "auto":
        raise ConfigError(
            "DATA.NUM_CLASSES auto is the number of classes of the training set, which is not "
            "read here: set a number"
        )
    return task_entry(cfg).load()(cfg, device)


def with_num_classes(cfg: CfgNode) -> CfgNode:
    """Return the config with the number of classes of its training set, if DATA.NUM_CLASSES is
    auto. Raises ConfigError or DataError if the training set cannot be opened."""
    if cfg.DATA.NUM_CLASSES != "auto":
        return cfg
    import torch

    from vil.config import override

    task = task_entry(cfg).load()(cfg, torch.device("cpu"))
    if not hasattr(task, "open_train_set"):
        raise ConfigError(
            f"DATA.NUM_CLASSES auto: the task {cfg.TASK} cannot count classes: set a number"
        )
    try:
        classes = task.open_train_set().classes
    except DataError as error:
        if not Path(cfg.DATA.PATH).exists():
            raise
        joint = "\n" if "\n" in str(error) else "; "  # below a drawing
        raise DataError(
            f"{error}{joint}DATA.NUM_CLASSES auto counts the classes of these data: without them, "
            "set a number"
        ) from error
    return override(cfg, [f"DATA.NUM_CLASSES={len(classes)}"])


def refuse_unless_defined(cfg: CfgNode, attribute: str, why: str) -> None:
    """Raise ConfigError unless the config's task defines an attribute that `Task` has no usable
    default of, such as "average_outputs". why: what the task lacks, for the message."""
    entry = task_entry(cfg)
    owner = next((c for c in entry.load().__mro__ if attribute in vars(c)), None)
    if owner is None or owner.__module__ == "vil.tasks.base":
        raise ConfigError(f"this config is for a {entry.facts.get('noun', entry.name)}: {why}")


def refuse_without(cfg: CfgNode, workflow: str) -> None:
    """Raise ConfigError if the config's task does not support a workflow, such as "export"."""
    entry = task_entry(cfg)
    if why := entry.facts.get("lacks", {}).get(workflow):
        noun = entry.facts.get("noun", entry.name)
        raise ConfigError(f"this config is for a {noun}: {why}")
