"""The registries whose names are values of config keys. They are read when a value is checked, so
that components of plug-ins count."""

import importlib

from vil.utils.registry import Registry

HOMES = {
    "attention": "vil.layers.attention:ATTENTIONS",
    "loss": "vil.tasks.classification:LOSSES",
    "optimizer": "vil.optim:OPTIMIZERS",
    "schedule": "vil.optim:SCHEDULES",
    "task": "vil.tasks:TASKS",
}


def registry(kind: str) -> Registry:
    """The registry of a kind of component; importing it does not import torch."""
    module, _, name = HOMES[kind].partition(":")
    return getattr(importlib.import_module(module), name)
