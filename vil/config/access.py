"""Read a component's keys from a config, and warn about those that nothing reads."""

import logging
from collections.abc import Iterable
from typing import Any

from yacs.config import CfgNode

from vil.config.defaults import KEYS, leaves, value_at
from vil.utils.registry import Entry

log = logging.getLogger(__name__)


def own_settings(cfg: CfgNode, entry: Entry) -> dict[str, Any]:
    """{argument: value} of the config keys that a component declares."""
    return {argument: value_at(cfg, key) for argument, key in entry.key_names.items()}


def warn_unused(cfg: CfgNode, why: str, names: Iterable[str]) -> None:
    """Warn once about changed keys among `names`, keys or sections that `why` does not read."""
    prefixes = tuple(f"{name}." for name in names)
    changed = [
        key
        for key, value in leaves(cfg).items()
        if f"{key}.".startswith(prefixes) and not (key in KEYS and value == KEYS[key].default)
    ]
    if changed:
        log.warning("%s, without effect: %s", why, ", ".join(changed))
