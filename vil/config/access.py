"""Read a component's keys from a config, and warn about keys that have no effect."""

import logging
from collections.abc import Iterable
from typing import Any

from yacs.config import CfgNode

from vil.config.defaults import KEYS, leaves, value_at
from vil.utils.registry import Entry

log = logging.getLogger(__name__)


def own_settings(cfg: CfgNode, entry: Entry) -> dict[str, Any]:
    """Read the config keys that set arguments of a component. Returns {argument: value}.

    entry: the component's registry entry, which maps its arguments to config keys.
    """
    return {argument: value_at(cfg, key) for argument, key in entry.key_names.items()}


def warn_unused(cfg: CfgNode, why: str, names: Iterable[str]) -> None:
    """Log one warning that lists the config keys which were set although they have no effect.

    why: the start of the message, such as "TASK is regression". names: keys and sections without
    effect. A key counts as set unless its value is the default.
    """
    prefixes = tuple(f"{name}." for name in names)
    changed = [
        key
        for key, value in leaves(cfg).items()
        if f"{key}.".startswith(prefixes) and not (key in KEYS and value == KEYS[key].default)
    ]
    if changed:
        log.warning("%s, so these keys have no effect: %s", why, ", ".join(changed))
