"""Grid of a sweep: a base config, and the settings in which the runs differ.

An axis is a config key with a list of values. A variant is a named set of settings. A cell of the
grid is one run, with a value for each axis and, if the grid has variants, one variant.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from yacs.config import CfgNode

from vil.config import override
from vil.config.defaults import KEYS
from vil.config.yaml_source import Setting
from vil.data import takes_list
from vil.utils.errors import ConfigError
from vil.workflows.configure import Options, resolve

VARIANT = re.compile(r"[A-Za-z0-9][\w,+-]*")  # a name, which becomes part of a folder's name
LONGEST = 40  # characters of a value in a folder's name


class Variant(NamedTuple):
    """Named set of settings of a sweep that change together. base: config file that replaces the
    base config of the grid; "" for no replacement."""

    name: str
    settings: tuple[Setting, ...] = ()
    base: str = ""


class Cell(NamedTuple):
    """One combination of settings in a sweep's grid, which defines one run.

    variant: the run's variant; None if the grid has no variants. values: for each axis (config key
    with a list of values), the setting with the run's value.
    """

    variant: Variant | None
    values: tuple[Setting, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The run's value for each config key that the grid varies, as {config key: value}. A value
        is given as the user wrote it."""
        return {setting.key: setting.value for setting in self.values}


@dataclass(frozen=True)
class Grid:
    """Settings of a sweep, which trains each variant with each combination of axis values.

    config: the base config; None for the defaults. fixed: settings of all runs. axes: {config key
    to vary: a setting for each value}. variants: named sets of settings. flags: {config key:
    value}, which override all other settings. imports: Python files to run first, which may
    register components.
    """

    config: CfgNode | str | None = None
    fixed: tuple[Setting, ...] = ()
    axes: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()

    def cells(self) -> Iterator[Cell]:
        """Yield the combination of settings of each run. The last axis varies fastest. Yields
        nothing if the grid has neither axes nor variants."""
        if not (self.axes or self.variants):
            return
        for variant in self.variants or (None,):
            for values in itertools.product(*self.axes.values()):
                yield Cell(variant, values)

    def base(self) -> CfgNode:
        """Return the frozen config with the settings that all runs share.

        If these settings are not valid on their own, but the config of the first run is valid,
        returns the config of the first run instead.
        """
        try:
            return self._resolve(self.config, self.fixed)
        except ConfigError:
            if first := next(self.cells(), None):
                with suppress(ConfigError):
                    return self.resolve(first)
            raise

    def resolve(self, cell: Cell) -> CfgNode:
        """Return the frozen config of one run. Raises ConfigError for an unknown key or a value
        that is not allowed."""
        own = cell.variant.settings if cell.variant else ()
        config = (cell.variant and cell.variant.base) or self.config
        return self._resolve(config, (*self.fixed, *own, *cell.values))

    def _resolve(self, config: CfgNode | str | None, settings: Sequence[Setting]) -> CfgNode:
        if isinstance(config, CfgNode):
            return override(config, settings, self.flags)
        return resolve(config, Options(settings, self.flags, self.imports))[0]

    def name(self, cell: Cell, *, without: Sequence[str] = ()) -> str:
        """Return the name of a run, such as "linformer-seed_0". The name consists of the variant's
        name and, for each config key that the grid varies, the short key and the run's value.
        without: config keys to leave out."""
        parts = [cell.variant.name.replace(",", "_")] if cell.variant else []
        for key, value in cell.settings.items():
            if key not in without:
                parts.append(f"{short_key(key, self.axes).lower()}_{slug(value)}")
        return "-".join(parts)


def is_axis(setting: Setting) -> bool:
    """Return whether a setting has a list of values to sweep over, rather than a single value.

    If one value of the config key is itself a list, the list to sweep over must contain a list.
    """
    if not isinstance(setting.value, list):
        return False
    section, _, name = setting.key.rpartition(".")
    if section == "DATA.KWARGS":
        is_list_key = takes_list(name)
    else:
        is_list_key = setting.key in KEYS and isinstance(KEYS[setting.key].default, list | tuple)
    return not is_list_key or any(isinstance(item, list) for item in setting.value)


def with_fixed(grid: Grid, setting: Setting) -> Grid:
    """Return a copy of the grid in which all runs have the given setting. An axis with the same
    config key is removed."""
    axes = {key: values for key, values in grid.axes.items() if key != setting.key}
    return replace(grid, fixed=(*grid.fixed, setting), axes=axes)


def with_axis(grid: Grid, setting: Setting) -> Grid:
    """Return a copy of the grid with an additional axis. A fixed setting of the same config key is
    removed. setting: the config key of the axis, with a list of values."""
    key, values, where = setting
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: {key}: expected a list of values, got {values!r:.80}")
    if twice := [value for i, value in enumerate(values) if value in values[:i]]:
        raise ConfigError(f"{where}: {key}: {plain(twice[0])!r} is given twice")
    axis = tuple(Setting(key, value, where) for value in values)
    fixed = tuple(other for other in grid.fixed if other.key != key)
    return replace(grid, fixed=fixed, axes={**grid.axes, key: axis})


def check_grid(grid: Grid) -> None:
    """Raise ConfigError for an invalid variant name, for OUTPUT_DIR, and for conflicting settings.

    OUTPUT_DIR must not be set for all runs or be an axis. Settings conflict if a variant sets the
    key of an axis, or if every variant overrides a setting in `grid.fixed`.
    """
    for variant in grid.variants:
        if not VARIANT.fullmatch(variant.name):
            raise ConfigError(
                f"variant {variant.name!r}: expected a name of letters, digits, '_', ',', '+' "
                "and '-' that starts with a letter or digit"
            )
        for setting in variant.settings:
            if setting.key in grid.axes:
                other = grid.axes[setting.key][0].where
                raise ConfigError(
                    f"{setting.where}: {setting.key} is set by the variant {variant.name}, but is "
                    f"also an axis of the grid ({other}): remove one of them"
                )
    for setting in (*grid.fixed, *(values[0] for values in grid.axes.values())):
        if setting.key == "OUTPUT_DIR":
            raise ConfigError(
                f"{setting.where}: OUTPUT_DIR is not allowed, because --output sets the folder of "
                "all runs"
            )
    set_by = [{setting.key for setting in variant.settings} for variant in grid.variants]
    for setting in grid.fixed:
        if set_by and all(setting.key in keys for keys in set_by):
            raise ConfigError(
                f"{setting.where}: {setting.key} has no effect, because every variant sets it: "
                "remove it here"
            )


# Names


def short_key(key: str, keys: Sequence[str]) -> str:
    """Shorten a dotted config key from the left, as far as it remains unique among `keys`. For
    example, OPTIM.LR becomes LR. keys: all config keys that the sweep varies."""
    words = key.split(".")
    for length in range(1, len(words)):
        end = ".".join(words[-length:])
        if not any(other != key and f".{other}".endswith(f".{end}") for other in keys):
            return end
    return key


def plain(value: Any) -> str:
    """Convert a value to text. The items of a list are joined by commas."""
    return ",".join(map(plain, value)) if isinstance(value, list) else str(value)


def slug(value: Any) -> str:
    """Convert a value to text for a folder's name. Characters other than letters, digits, ".", "+"
    and "-" are replaced by "_". A long text is cut, and a digest of the full text is appended."""
    text = re.sub(r"[^A-Za-z0-9.+-]+", "_", plain(value)).strip("_") or "none"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 5]}-{digest(plain(value))}"


def digest(text: str) -> str:
    """Return four hex digits of the SHA-256 hash of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:4]
