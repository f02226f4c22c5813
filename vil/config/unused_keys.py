"""Warn about config keys that the user set although they have no effect."""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.config.defaults import KEYS, leaves
from vil.config.yaml_source import packaged_root

RECIPE = "_recipe"  # attribute of a config, which its copies have too

log = logging.getLogger(__name__)


def is_recipe(source: str, num_keys: int) -> bool:
    """Return whether the user did not write the settings of a source, such as a packaged config.

    A preset is one too, and so is a file that sets most of all keys, such as the config.yaml of a
    run, which records the values of other sources. source: see `Setting.source`. num_keys: number
    of keys that it sets.
    """
    if not os.path.isfile(source):  # also the command line and the environment
        return source.startswith("preset ")
    is_packaged = Path(source).resolve().is_relative_to(packaged_root())
    return is_packaged or num_keys > len(KEYS) / 2


def store_recipe(cfg: CfgNode, values: Mapping[str, Any]) -> None:
    """Store in a config the values that recipes set, {key: value}."""
    vars(cfg)[RECIPE] = dict(values)


def recipe_values(cfg: CfgNode) -> dict[str, Any]:
    """Return the values that `store_recipe` stored in a config."""
    return vars(cfg).get(RECIPE, {})


def set_by_user(cfg: CfgNode) -> list[str]:
    """Return the config keys whose value is neither the default nor that of a recipe."""
    recipe = recipe_values(cfg)
    return [
        key
        for key, value in leaves(cfg).items()
        if not (key in KEYS and value == KEYS[key].default)
        and not (key in recipe and value == recipe[key])
    ]


def warn_unused(cfg: CfgNode, why: str, names: Iterable[str]) -> None:
    """Log one warning that lists the config keys that the user set although they have no effect.

    why: the start of the message, such as "TASK is regression". names: keys and sections without
    effect.
    """
    prefixes = tuple(f"{name}." for name in names)
    changed = [key for key in set_by_user(cfg) if f"{key}.".startswith(prefixes)]
    if changed:
        log.warning("%s, so these keys have no effect: %s", why, ", ".join(changed))
