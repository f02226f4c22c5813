"""Merge all sources of settings into one checked and frozen config.

Later sources override earlier ones: environment, preset, base files, file, command line. yacs's
merge_from_list is not used, because its errors have no location.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.config import defaults, legacy
from vil.config.coercion import coerce, free, kind
from vil.config.key_lookup import is_known, nearest
from vil.config.plugins import run_imports
from vil.config.presets import below, read_preset
from vil.config.registries import registry
from vil.config.removed import REMOVED, drop_keys
from vil.config.unused_keys import is_recipe, recipe_values, store_recipe
from vil.config.yaml_source import (
    COMMAND_LINE,
    EMPTY,
    ConfigError,
    Setting,
    find,
    from_file,
    from_options,
)
from vil.utils.lookup import did_you_mean, lookup
from vil.utils.registry import load_object

PREPROCESSING = "vil.integrations.external_models:preprocessing"  # imports torch

log = logging.getLogger(__name__)


def get_config(
    file: str | Path | None = None, opts: Sequence[str | Setting] = (), imports: Sequence[str] = ()
) -> CfgNode:
    """Return the frozen config from the defaults, a file, and options (KEY VALUE or KEY=VALUE).

    The options override the file. imports: Python files to run first, which may register
    components. Raises ConfigError for an unknown key or an invalid value.
    """
    return load_config(file, opts, imports=imports)[0]


def load_config(
    file: str | Path | None = None,
    opts: Sequence[str | Setting] = (),
    fallbacks: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    imports: Sequence[str] = (),
    preset: str | None = None,
) -> tuple[CfgNode, dict[str, str]]:
    """Return the frozen config, and {key: source, such as file:line} for the keys that are set.

    opts: options KEY VALUE or KEY=VALUE, which override the file.
    fallbacks: {key: value} with the lowest priority, from the environment.
    flags: {key: value} with the highest priority.
    imports: Python files to run first, in addition to the IMPORTS of the config file.
    preset: name of a preset, which the file and the options override.
    """
    in_preset = read_preset(preset) if preset else []
    in_file = from_file(find(file)) if file else []
    recorded = [s for s in in_file if s.key == "IMPORTS"]
    imported = run_imports(
        imports, [(name, s.where) for s in recorded for name in _read(s, [""], "a list of files")]
    )
    defaults.declare_component_keys()
    settings = [setting for setting in in_file if setting.key != "IMPORTS"]
    settings += _from_command_line(opts, flags)
    outside = [Setting(key, value, "environment") for key, value in (fallbacks or {}).items()]
    settings = [*outside, *below(in_preset, settings), *settings]
    cfg, sources = _merge({"IMPORTS": tuple(imported)}, settings)
    legacy.warn_revived(cfg.MODEL.VIT.MSVIT.LN_EPS, sources)
    return cfg, sources


def override(
    cfg: CfgNode, opts: Sequence[str | Setting] = (), flags: Mapping[str, str] | None = None
) -> CfgNode:
    """Return a frozen and checked copy of a config with some values changed.

    opts: options KEY VALUE or KEY=VALUE. flags: {key: value}, which override the options.
    """
    settings = _from_command_line(opts, flags)
    return _merge(defaults.leaves(cfg.clone()), settings, recipe_values(cfg))[0]


def diff(cfg: CfgNode, other: CfgNode) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in cfg, value in other)} for keys that differ. A missing key has the
    value None."""
    ours, theirs = defaults.leaves(cfg), defaults.leaves(other)
    pairs = {key: (ours.get(key), theirs.get(key)) for key in {**ours, **theirs}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _read(setting: Setting, default: Any, wanted: str, element: Any = 0.0) -> Any:
    """Return the value of a setting, converted to the type of `default`. Raises ConfigError if the
    value cannot be converted. wanted: the type in words, for the message. element: see `coerce`."""
    try:
        return coerce(setting.value, default, element)
    except ValueError:
        key, value, where = setting
        raise ConfigError(f"{where}: {key}: expected {wanted}, got {value!r:.80}") from None


def _from_command_line(
    opts: Sequence[str | Setting], flags: Mapping[str, str] | None
) -> list[Setting]:
    settings = legacy.modernise(list(from_options(opts)), is_known)
    return settings + [Setting(key, value, COMMAND_LINE) for key, value in (flags or {}).items()]


def _merge(
    values: Mapping[str, Any],
    settings: Sequence[Setting],
    recipe: Mapping[str, Any] | None = None,
) -> tuple[CfgNode, dict[str, str]]:
    """Return a frozen and checked config, and {key: source} for the keys that the settings set.

    The settings override `values`, {key: value}, which override the defaults. recipe: those of
    `values` that the user did not set, see `store_recipe`.
    """
    values, sources = dict(values), {}
    given = set(values)
    from_recipe = {key for key, value in (recipe or {}).items() if values.get(key) == value}
    counts = Counter(setting.source for setting in settings)
    recipes = {source for source, count in counts.items() if is_recipe(source, count)}
    settings = drop_keys(
        settings, legacy.IGNORED_KEYS, "these keys of the original 2021 code have no effect"
    )
    settings = drop_keys(settings, REMOVED, "these keys were removed and have no effect")
    for setting in settings:
        key = setting.key
        if key in defaults.SECTIONS and setting.value == "":
            continue  # a section whose lines are all commented out
        if setting.value == EMPTY:
            values = {name: values[name] for name in values if not name.startswith(f"{key}.")}
        else:
            values[key] = _value_of(setting)
        sources[key] = setting.where
        from_recipe = from_recipe | {key} if setting.source in recipes else from_recipe - {key}
    values = defaults.leaves(defaults.tree(values))
    values["TASK"] = _infer_task(values, settings)
    metric = _infer_metric(values, settings, warn="EVAL.METRIC" not in from_recipe)
    if values["EVAL.METRIC"] != metric:
        values["EVAL.METRIC"] = metric
        sources.pop("EVAL.METRIC", None)
    _check(values, sources)
    if values["MODEL.PRETRAINED"]:
        arch, channels = values["MODEL.ARCH"], values["INPUT.CHANNELS"]
        for key, value in load_object(PREPROCESSING)(arch, channels).items():
            if key not in given and key not in sources:
                values[key], sources[key] = value, f"weights of {arch}"
    cfg = defaults.tree(values)
    store_recipe(cfg, {key: values[key] for key in from_recipe if key in values})
    cfg.freeze()
    return cfg, sources


def _value_of(setting: Setting) -> Any:
    """Return the value of a setting, converted to the type of its key. Raises ConfigError if the
    key is unknown or the value cannot be converted."""
    key, value, where = setting
    if key == "IMPORTS":
        raise ConfigError(f"{where}: IMPORTS: expected the flag --import FILE, not this key")
    if key in defaults.SECTIONS:
        raise ConfigError(f"{where}: {key}: expected a section of keys, got {value!r:.80}")
    if not is_known(key):
        raise ConfigError(f"{where}: {key}: unknown key{did_you_mean(nearest(key))}")
    if key not in defaults.KEYS:
        return free(value)
    declared = defaults.KEYS[key]
    if value in declared.words:
        return str(value)
    wanted = " or ".join((kind(declared.default, declared.element), *declared.words))
    return _read(setting, declared.default, wanted, declared.element)


def _infer_task(values: Mapping[str, Any], settings: Sequence[Setting]) -> str:
    """Return the task that another key than TASK, such as DETECTION.MODEL, implies, or else TASK.

    An explicit TASK is kept if it is set after the other key, or if both are set in the same file
    or both on the command line. values: {key: value} of all keys.
    """
    last = {setting.key: index for index, setting in enumerate(settings)}
    explicit, task = last.get("TASK", -1), values["TASK"]
    for name, entry in registry("task").items():
        key = entry.facts.get("implied_by")
        implied = last.get(key, -1)
        if implied <= explicit or not values[key]:
            continue
        if explicit < 0 or settings[explicit].source != settings[implied].source:
            task = name
    return task


def _infer_metric(
    values: Mapping[str, Any], settings: Sequence[Setting], *, warn: bool = True
) -> str:
    """Return EVAL.METRIC, or "" (the default metric of the task) if the task does not have this
    metric, or not with DATA.TARGETMAP, and the task or the map was set after it: a recipe for
    photographs may be the base of another task.

    values: {key: value} of all keys. warn: whether to log a warning if the metric is ignored.
    """
    metric, entries = values["EVAL.METRIC"], registry("task")
    task = entries.get(values["TASK"])
    if not metric or task is None:
        return metric
    keys = {"TASK", *(entry.facts.get("implied_by") for entry in entries.values())}
    why = f"is not a metric of TASK {task.name}"
    if metric in task.facts.get("metrics", {}):
        if not values["DATA.TARGETMAP"] or metric in task.facts.get("mapped_metrics", [metric]):
            return metric
        keys, why = {"DATA.TARGETMAP"}, "is not computed with DATA.TARGETMAP"
    chosen = [s for s in settings if s.key == "EVAL.METRIC" or s.key in keys]
    origins = [s.source for s in chosen if s.key == "EVAL.METRIC"]
    if not chosen or chosen[-1].key == "EVAL.METRIC" or origins[-1:] == [chosen[-1].source]:
        return metric  # a mistake, which is reported later
    if warn:
        log.warning("EVAL.METRIC %s %s, so it is ignored", metric, why)
    return ""


def _check(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raise ConfigError if a value or a combination of values is not allowed. values: {key: value}
    of all keys. sources: {key: source of its value} for the keys that were set."""
    for key, rule in ((key.name, key.check) for key in defaults.KEYS.values()):
        if rule and not rule.holds(values[key]):
            where = sources.get(key, "default")
            near = did_you_mean(rule.proposal(values[key]))
            raise ConfigError(
                f"{where}: {key}: expected {rule.sentence}, got {values[key]!r:.80}{near}"
            )
    for keys, is_broken_by, sentence in defaults.CONFLICTS:
        if is_broken_by(*(values[key] for key in keys)):
            given = [f"{key} {values[key]!r} ({sources.get(key, 'default')})" for key in keys]
            raise ConfigError(f"{', '.join(given)}: {sentence}")
    if metric := values["EVAL.METRIC"]:
        task = registry("task")[values["TASK"]]
        try:
            lookup(task.facts.get("metrics", {}), metric, f"metric of TASK {task.name}")
        except ValueError as error:
            where = sources.get("EVAL.METRIC", "default")
            raise ConfigError(f"{where}: EVAL.METRIC: {error}") from None
