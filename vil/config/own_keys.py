"""The config keys of a component: read for its constructor, and added to the tree by a plug-in."""

import functools
from typing import Any

from yacs.config import CfgNode

from vil.utils.registry import Entry


def own_settings(cfg: CfgNode, entry: Entry) -> dict[str, Any]:
    """{argument: value} of the config keys that a component declares."""
    return {argument: value_at(cfg, key) for argument, key in entry.key_names.items()}


def value_at(cfg: CfgNode, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(CfgNode.__getitem__, key.split("."), cfg)
