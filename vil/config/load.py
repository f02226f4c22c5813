"""From all sources to one checked, frozen tree and the origin of each value.

Later settings win: environment, base files, file, command line.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.config import defaults, legacy
from vil.config.coercion import coerce, free, kind
from vil.config.plugins import run_imports
from vil.config.registries import registry
from vil.config.yaml_source import (
    COMMAND_LINE,
    EMPTY,
    ConfigError,
    Setting,
    did_you_mean,
    find,
    from_file,
    from_options,
)

log = logging.getLogger(__name__)


def get_config(
    file: str | Path | None = None, opts: Sequence[str] = (), imports: Sequence[str] = ()
) -> CfgNode:
    """The frozen config made of the defaults, a file and options (KEY VALUE or KEY=VALUE).

    imports: Python files that register components, run first.
    """
    return load_config(file, opts, imports=imports)[0]


def load_config(
    file: str | Path | None = None,
    opts: Sequence[str] = (),
    fallbacks: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    imports: Sequence[str] = (),
) -> tuple[CfgNode, dict[str, str]]:
    """The frozen config and {key: where its value was given}, without the keys left at defaults.

    `fallbacks` are values from the environment; every other source wins over them. `flags` win over
    all. imports: Python files to run first; those that the file records in IMPORTS run, too.
    """
    settings = [Setting(key, value, "environment") for key, value in (fallbacks or {}).items()]
    in_file = from_file(find(file)) if file else []
    recorded = [s for s in in_file if s.key == "IMPORTS"]
    imported = run_imports(imports, [(name, s.where) for s in recorded for name in _names(s)])
    defaults.add_component_keys()
    settings += [setting for setting in in_file if setting.key != "IMPORTS"]
    settings += legacy.modernise(list(from_options(opts)), defaults.is_known)
    settings += [Setting(key, value, COMMAND_LINE) for key, value in (flags or {}).items()]
    cfg, sources = defaults.tree(), {}
    for setting in settings:
        if setting.key in defaults.SECTIONS and setting.value == "":
            continue  # a section whose lines are all commented out
        _assign(cfg, setting)
        sources[setting.key] = setting.where
    cfg.IMPORTS = tuple(imported)
    _infer_task(cfg, settings)
    _check(cfg, sources)
    _warn(cfg, sources)
    cfg.freeze()
    return cfg, sources


def _names(setting: Setting) -> list[str]:
    """The items of a list of names."""
    try:
        return coerce(setting.value, [""])
    except ValueError:
        wanted = f"expected a list of files, got {setting.value!r:.80}"
        raise ConfigError(f"{setting.where}: IMPORTS: {wanted}") from None


def override(
    cfg: CfgNode, opts: Sequence[str] = (), flags: Mapping[str, str] | None = None
) -> CfgNode:
    """A frozen copy of a config with other values, checked again."""
    changed, sources = cfg.clone(), {}
    changed.defrost()
    settings = legacy.modernise(list(from_options(opts)), defaults.is_known)
    settings += [Setting(key, value, COMMAND_LINE) for key, value in (flags or {}).items()]
    for setting in settings:
        _assign(changed, setting)
        sources[setting.key] = setting.where
    _infer_task(changed, settings)
    _check(changed, sources)
    changed.freeze()
    return changed


def _assign(cfg: CfgNode, setting: Setting) -> None:
    key, value, where = setting
    if value == EMPTY:
        *path, name = key.split(".")
        functools.reduce(CfgNode.__getitem__, path, cfg)[name] = defaults.tree_at(key)
        return
    if key == "IMPORTS":
        raise ConfigError(f"{where}: IMPORTS: expected the flag --import FILE instead")
    if key in defaults.SECTIONS:
        raise ConfigError(f"{where}: {key}: expected a section of keys, got {value!r:.80}")
    if not defaults.is_known(key):
        raise ConfigError(f"{where}: {key}: unknown key{did_you_mean(defaults.nearest(key))}")
    node = cfg
    *path, name = key.split(".")
    for step in path:
        node = node[step]
    try:
        node[name] = coerce(value, defaults.KEYS[key]) if key in defaults.KEYS else free(value)
    except ValueError:
        wanted = f"expected {kind(defaults.KEYS[key])}, got {value!r:.80}"
        raise ConfigError(f"{where}: {key}: {wanted}") from None


def _infer_task(cfg: CfgNode, settings: Sequence[Setting]) -> None:
    """Set TASK to what another key implies, such as DETECTION.MODEL, unless the source that sets
    that key, or a later one, sets TASK too."""
    explicit = next((s for s in reversed(settings) if s.key == "TASK"), None)
    for name, entry in registry("task").items():
        key = entry.facts.get("implied_by")
        implied = next((s for s in reversed(settings) if s.key == key), None)
        if implied is None or not functools.reduce(CfgNode.__getitem__, key.split("."), cfg):
            continue
        later = explicit is None or settings.index(implied) > settings.index(explicit)
        if later and not (explicit and source_of(explicit) == source_of(implied)):
            cfg.TASK = name


def source_of(setting: Setting) -> str:
    """The file, or the command line, that a setting stands in."""
    return setting.where.rpartition(":")[0] or setting.where


def _check(cfg: CfgNode, sources: Mapping[str, str]) -> None:
    values = defaults.leaves(cfg)
    for key, rule in defaults.CHECKS.items():
        if not rule.holds(values[key]):
            where = sources.get(key, "default")
            near = did_you_mean(rule.proposal(values[key]))
            raise ConfigError(
                f"{where}: {key}: expected {rule.sentence}, got {values[key]!r:.80}{near}"
            )
    for keys, found, sentence in defaults.CONFLICTS:
        if found(*(values[key] for key in keys)):
            given = [f"{key} {values[key]!r} ({sources.get(key, 'default')})" for key in keys]
            raise ConfigError(f"{', '.join(given)}: {sentence}")


def _warn(cfg: CfgNode, sources: Mapping[str, str]) -> None:
    changed = diff(cfg, defaults.tree())
    dead = [f"{key} ({why})" for key, why in defaults.IGNORED_KEYS.items() if key in changed]
    if dead:
        log.warning("keys that never had an effect: %s", ", ".join(dead))
    legacy.warn_revived(cfg, sources)


def diff(cfg: CfgNode, other: CfgNode) -> dict[str, tuple[Any, Any]]:
    """{key: (value in cfg, value in other)} where they differ; None where a key is missing."""
    mine, theirs = defaults.leaves(cfg), defaults.leaves(other)
    pairs = {key: (mine.get(key), theirs.get(key)) for key in {**mine, **theirs}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
