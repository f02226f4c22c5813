"""Warn about config keys that have no effect."""

import logging
from collections.abc import Iterable

from yacs.config import CfgNode

from vil.config.defaults import KEYS, leaves

log = logging.getLogger(__name__)


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
