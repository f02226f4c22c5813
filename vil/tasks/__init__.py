"""The registry of tasks. Each task of this package has its own folder.

A registry entry has the location of the task's class, and may have these additional properties:

declares    config sections, keys and conflicts, in the format of vil/config/defaults
noun        noun for a model of the task in messages, such as "detector"
implied_by  config key that selects the task if this key is set and the key TASK is not set
commands    {command: one-line help} for the task's commands, such as "detect check"
metrics     {metric: (label, unit, higher is better)} for EVAL.METRIC, the default first
mapped_metrics  those of `metrics` that are computed with DATA.TARGETMAP; by default all
formats     choices of `vil predict --format`, the default first
flags       {flag of `vil predict`: config key that the flag sets}
defaults    {config key: default value in `vil predict`}
"""

import logging
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.tasks import detection, distillation, image, segmentation, simmim
from vil.utils.errors import ConfigError, DataError, as_config_error
from vil.utils.registry import Entry, Key, Registry, Section

FEWEST_CLASSES = 2  # assumed by commands that need no data if DATA.NUM_CLASSES is auto

log = logging.getLogger(__name__)

TASKS = Registry("task", check="vil.tasks.base:check_task")
TASKS.add("classification", **image.ENTRIES["classification"])
TASKS.add("detection", **detection.ENTRY)
TASKS.add("distillation", **distillation.ENTRY)
TASKS.add("multilabel", **image.ENTRIES["multilabel"])
TASKS.add("regression", **image.ENTRIES["regression"])
TASKS.add("segmentation", **segmentation.ENTRY)
TASKS.add("simmim", **simmim.ENTRY)


def register_task(name: str, task: Any, *, about: str = "", **facts: Any) -> None:
    """Register a task as the value `name` of the config key TASK.

    task: a subclass of `vil.tasks.base.Task`, which is called as task(cfg, device), or its location
    "module:Class". about: a one-line description. facts: additional properties of the registry
    entry, such as `metrics`, listed at the top of vil/tasks/__init__.py. The property `keys` is a
    dict whose values, of the type `vil.utils.registry.Key`, are added to the config.

    Raises ValueError if the name is taken or if the class does not define a required method.
    """
    TASKS.register(name, task, about, **facts)


def task_for(cfg: CfgNode, device) -> "Task":  # noqa: F821 - vil.tasks.base needs torch
    """Build the task that a config selects. Logs a warning if keys of other tasks are set.

    Raises ConfigError if DATA.NUM_CLASSES is auto, unless the task accepts any classes. Call
    `with_num_classes` first, which replaces auto by a number.
    """
    from vil.config.unused_keys import warn_unused

    entry = TASKS.entry(cfg.TASK)
    if cfg.DATA.NUM_CLASSES == "auto" and not entry.load().accepts_any_classes:
        raise ConfigError(
            "DATA.NUM_CLASSES is auto, but this command cannot count the classes, because it does "
            "not read the training set: set DATA.NUM_CLASSES to a number"
        )
    warn_unused(cfg, f"TASK is {cfg.TASK}", keys_of_others(entry))
    return entry.load()(cfg, device)


def keys_of_others(entry: Entry) -> list[str]:
    """Return the config keys that a task does not use, because only other tasks declare them.

    A task also uses the keys of the registered tasks that it inherits from. entry: registry entry
    of the task.
    """
    bases = entry.load().__mro__
    homes = {*bases, *(f"{base.__module__}:{base.__qualname__}" for base in bases)}
    others = [other for other in TASKS.values() if other != entry and other.home not in homes]
    declared = {name for other in others for name in declared_keys(other)}
    return sorted(declared.difference(entry.key_names.values()))


def declared_keys(entry: Entry) -> list[str]:
    """Return the names of the config keys that a task declares. entry: its registry entry."""
    names, section = [key.name for key in entry.keys.values() if isinstance(key, Key)], ""
    for item in entry.facts.get("declares", ()):
        if isinstance(item, Section):
            section = item.name and f"{item.name}."
        elif isinstance(item, Key):
            names.append(section + item.name)
    return names


@as_config_error
def with_num_classes(cfg: CfgNode, default: int | None = None, *, trains: bool = False) -> CfgNode:
    """If DATA.NUM_CLASSES is auto, replace it by the number of classes of the training set.

    default: number to use, with a warning, if the training set cannot be opened; for commands that
    need no data. trains: whether the command reads the training set anyway, so that an error in it
    needs no explanation. Returns a changed copy of the config, or the config itself if
    DATA.NUM_CLASSES is a number. Without a default, raises ConfigError or DataError if the training
    set cannot be opened.
    """
    if cfg.DATA.NUM_CLASSES != "auto":
        return cfg
    import torch

    from vil.config import override

    task = TASKS.entry(cfg.TASK).load()(cfg, torch.device("cpu"))
    if not task.supports("open_train_set"):
        raise ConfigError(
            f"DATA.NUM_CLASSES is auto, but the task {cfg.TASK} cannot count the classes of the "
            "training set: set DATA.NUM_CLASSES to a number"
        )
    try:
        classes = task.open_train_set().classes
    except (ConfigError, DataError) as error:
        if default is not None:
            log.warning(
                "DATA.NUM_CLASSES is auto, but no training set can be opened to count its classes: "
                "the model is built with %d; set DATA.NUM_CLASSES to a number",
                default,
            )
            return override(cfg, [f"DATA.NUM_CLASSES={default}"])
        if isinstance(error, ConfigError):
            raise
        if trains or not Path(cfg.DATA.PATH).exists():
            raise
        joint = "\n" if "\n" in str(error) else "; "  # new line if `error` has several lines
        raise DataError(
            f"{error}{joint}DATA.NUM_CLASSES is auto, so the classes of the training set are "
            "counted: if you have no training set, set DATA.NUM_CLASSES to a number"
        ) from error
    return override(cfg, [f"DATA.NUM_CLASSES={len(classes)}"])


def refuse_without(task: str, ability: str, why: str) -> None:
    """Raise ConfigError unless a task has an ability, see `Task.supports`.

    task: name of the task. ability: name of a method that the task must define, such as
    "average_outputs", or of a class attribute that must be set. why: end of the error message,
    which tells the user what to do.
    """
    if not TASKS.entry(task).load().supports(ability):
        raise ConfigError(f"this config is for a {noun_of(task)}: {why}")


def noun_of(task: str) -> str:
    """Return the noun for a model of a task, such as "detector". task: name of the task."""
    return TASKS.entry(task).facts.get("noun", task)
