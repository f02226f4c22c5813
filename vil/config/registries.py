"""Find the registries that define the allowed values of config keys.

For example, the value of OPTIM.OPT must be a name in the registry of optimizers. A registry is read
when a value is checked, so that components of plug-ins are included.
"""

from vil.utils.registry import Registry, load_object

HOMES = {
    "attention": "vil.layers.attention:ATTENTIONS",
    "loss": "vil.tasks.image:LOSSES",
    "optimizer": "vil.optim:OPTIMIZERS",
    "schedule": "vil.optim:SCHEDULES",
    "task": "vil.tasks:TASKS",
    "transform": "vil.data:TRANSFORMS",
}


def registry(kind: str) -> Registry:
    """Return the registry of a kind of component, such as "optimizer", without importing torch."""
    return load_object(HOMES[kind])
