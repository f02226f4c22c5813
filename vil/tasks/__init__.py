"""What is learned: one folder per task, and the registry that names them.

An entry declares, besides the task's class:

noun        what its model is called
implied_by  a config key that, where it is set, means this task if TASK is empty
hint        how a config of the task is made
examples    {command: command lines} of the task's spelling of the commands
formats     of `vil predict --format`, the default first
flags       of `vil predict` that set a config key
defaults    {config key: value} of `vil predict`
lacks       {workflow: why the task has none}
"""

from yacs.config import CfgNode

from vil.tasks import classification, detection
from vil.utils.errors import ConfigError
from vil.utils.registry import Entry, Registry

TASKS = Registry("task")
TASKS.add("classification", **classification.ENTRY)
TASKS.add("detection", **detection.ENTRY)


def task_entry(cfg: CfgNode) -> Entry:
    """The registry's entry of a config's task."""
    return TASKS.entry(cfg.TASK)


def task_for(cfg: CfgNode, device) -> "Task":  # noqa: F821 - vil.tasks.base needs torch
    """Build the task of a config."""
    return task_entry(cfg).load()(cfg, device)


def refuse_without(cfg: CfgNode, workflow: str) -> None:
    """Raise ConfigError where a config's task lacks a workflow."""
    entry = task_entry(cfg)
    if why := entry.facts.get("lacks", {}).get(workflow):
        noun = entry.facts.get("noun", entry.name)
        raise ConfigError(f"this config is a {noun}'s: {why}")
