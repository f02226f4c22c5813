"""Make the grid of a sweep from command-line words, Python values, and a YAML file."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.config.yaml_source import (
    EMPTY,
    Setting,
    base_roots,
    find,
    find_base,
    from_mapping,
    from_options,
    read_text,
    read_yaml,
    shown,
)
from vil.utils.errors import ConfigError
from vil.utils.lookup import lookup
from vil.workflows.configure import Overrides, as_options, make_config, set_flags
from vil.workflows.log_forwarding import forward_logs
from vil.workflows.sweeping.grid import Grid, Variant, check_grid, is_axis, with_axis, with_fixed

PARTS = dict.fromkeys(("base", "fixed", "grid", "variants"))  # top-level keys of a grid file


def make_grid(
    config: CfgNode | str | Path | None = None,
    overrides: Overrides | None = None,
    *,
    file: str | Path | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    flags: Mapping[str, str | Path | None] | None = None,
    imports: Sequence[str] = (),
) -> Grid:
    """Make the grid of a sweep from Python values and a file.

    config: the base config. Must be None if `file` sets a base config.
    overrides: settings of all runs. A list of values makes its key an axis: the sweep tries each
    value. For a config key whose value is a list itself, pass a list of lists.
    file: YAML file, see `read_grid`. `overrides` and `axes` replace its settings of the same keys.
    axes: {config key: values to sweep over}.
    variants: {name: {key: value}}, which replace all variants of `file`. The key _BASE_ is a config
    file that replaces the base config.
    flags: {config key: value}, which override all other settings and axes. Keys whose value is None
    are ignored.
    imports: Python files to run first.

    Raises ConfigError for invalid or contradictory settings.
    """
    grid = read_grid(file) if file else Grid()
    if config is not None and grid.config is not None:
        raise ConfigError(f"{file} and --config-file both set the base config: remove one of them")
    config = str(config) if isinstance(config, Path) else config
    flags = set_flags(flags or {})
    grid = replace(grid, flags=flags, imports=tuple(imports))
    grid = replace(grid, config=grid.config if config is None else config)
    with forward_logs(False):  # plan_sweep repeats the warnings
        make_config(grid.config, imports=imports)  # runs the imports, so that their keys are known
    for setting in from_options(as_options(overrides)):
        grid = with_axis(grid, setting) if is_axis(setting) else with_fixed(grid, setting)
    for setting in from_mapping({key: list(of) for key, of in (axes or {}).items()}, "grid"):
        grid = with_axis(grid, setting)
    grid = replace(grid, axes={key: of for key, of in grid.axes.items() if key not in flags})
    if variants is not None:
        grid = replace(grid, variants=tuple(as_variant(*item) for item in variants.items()))
    check_grid(grid)
    return grid


def as_variant(name: str, settings: Mapping[str, Any]) -> Variant:
    """Make a variant of a sweep from {config key: value}. The key _BASE_ sets the base config of
    the variant."""
    base = settings.get("_BASE_", "")
    keys = {key: value for key, value in settings.items() if key != "_BASE_"}
    return Variant(name, tuple(from_mapping(keys, "grid")), str(base))


def read_grid(file: str | Path) -> Grid:
    """Read the grid of a sweep from a YAML file with the keys `base`, `fixed`, `grid` and
    `variants`.

    base: a config file, relative to the folder of the YAML file or of the packaged configs.
    fixed: settings of all runs.
    grid: {config key: list of values}.
    variants: {name: {config key: value}}. The key _BASE_ is a config file that replaces `base`.

    Config keys may be nested or dotted. Raises ConfigError if this file, or one that it names, is
    missing or invalid.
    """
    path = find(file)
    settings = read_yaml(read_text(path), shown(path), keeps_empty=is_variant)
    grid, variants = Grid(), {}
    for setting in settings:
        part, _, key = setting.key.partition(".")
        try:
            lookup(PARTS, part, "part of a sweep")
        except ValueError as error:
            raise ConfigError(f"{setting.where}: {error}") from None
        inner = setting._replace(key=key)
        if part == "base" and isinstance(setting.value, str) and not key:
            base = find_base(setting.value, path, setting.where, base_roots(path))
            grid = replace(grid, config=str(base))
        elif part == "variants" and key:
            name, _, name_of_key = key.partition(".")
            variants.setdefault(name, []).append(inner._replace(key=name_of_key))
        elif key and part != "base":
            grid = with_axis(grid, inner) if part == "grid" else with_fixed(grid, inner)
        elif setting.value not in ("", EMPTY):
            raise ConfigError(
                f"{setting.where}: {part}: expected "
                f"{'a config file' if part == 'base' else 'a mapping of keys to values'}, "
                f"got {setting.value!r:.80}"
            )
    return replace(grid, variants=tuple(_variant(path, *item) for item in variants.items()))


def is_variant(key: str) -> bool:
    """Return whether a dotted key of a grid file, such as "variants.a", stands for a complete
    variant instead of one setting of a variant."""
    return key.startswith("variants.") and key.count(".") == 1


def _variant(path: Path, name: str, settings: Sequence[Setting]) -> Variant:
    base, own = "", []
    for setting in settings:
        if setting.key == "_BASE_":
            base = str(find_base(str(setting.value), path, setting.where, base_roots(path)))
        elif setting.key:
            own.append(setting)
        elif setting.value not in ("", EMPTY):
            raise ConfigError(
                f"{setting.where}: variant {name}: expected a mapping of config keys to values, "
                f"got {setting.value!r:.80}"
            )
    return Variant(name, tuple(own), base)
