"""The registry of tasks, one folder each.

An entry declares, besides the task's class:

declares    sections, keys and conflicts of the config, as in vil/config/defaults
noun        the name of its models
implied_by  a config key that selects this task if TASK is empty
hint        how to write a config of the task
commands    {name: one line} of its own commands and spellings: "detect train", "detect check"
spellings   {name: examples} of other names for `vil train` and so on: "detect train"
formats     of `vil predict --format`, the default first
flags       {flag: config key} of `vil predict`
defaults    {config key: value} of `vil predict`
lacks       {workflow: why the task does not have it}
"""

from typing import Any

from yacs.config import CfgNode

from vil.tasks import classification, detection
from vil.utils.errors import ConfigError
from vil.utils.registry import Entry, Registry

TASKS = Registry("task", check="vil.tasks.base:check_task")
TASKS.add("classification", **classification.ENTRY)
TASKS.add("detection", **detection.ENTRY)


def register_task(name: str, task: Any, *, about: str = "", **facts: Any) -> None:
    """Add a task for the key TASK: a subclass of `vil.tasks.base.Task`, called as task(cfg,
    device), or its "module:Class". facts: see the top of this file; `keys` adds config keys.

    Raises ValueError for a name that is taken, and for a class without a required method.
    """
    TASKS.register(name, task, about, **facts)


def task_entry(cfg: CfgNode) -> Entry:
    """Return the registry entry of a config's task."""
    return TASKS.entry(cfg.TASK)


def task_for(cfg: CfgNode, device) -> "Task":  # noqa: F821 - vil.tasks.base needs torch
    """Build the task of a config."""
    return task_entry(cfg).load()(cfg, device)


def refuse_without(cfg: CfgNode, workflow: str) -> None:
    """Raise ConfigError if a config's task lacks a workflow."""
    entry = task_entry(cfg)
    if why := entry.facts.get("lacks", {}).get(workflow):
        noun = entry.facts.get("noun", entry.name)
        raise ConfigError(f"this config is a {noun}'s: {why}")
