"""Nothing is silent: settings that are read by nothing in what a config makes."""

import logging
from collections.abc import Iterable

from yacs.config import CfgNode

from vil.config.defaults import KEYS, leaves

log = logging.getLogger(__name__)


def warn_unused(cfg: CfgNode, why: str, names: Iterable[str]) -> None:
    """One warning for those of the keys, or of all below the nodes, that are not at their defaults;
    why: what it is that does not read them."""
    nodes = tuple(f"{name}." for name in names)
    values = {key: value for key, value in leaves(cfg).items() if f"{key}.".startswith(nodes)}
    changed = [key for key, value in values.items() if value != KEYS.get(key)]
    if changed:
        log.warning("%s, without effect: %s", why, ", ".join(changed))
