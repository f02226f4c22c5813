"""The grid of a sweep: a base config, and the settings in which its runs differ.

A cell of a grid is one run: a variant, if there are any, with one value for each axis.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from yacs.config import CfgNode

from vil.config import override
from vil.config.defaults import KEYS
from vil.config.yaml_source import Setting
from vil.utils.errors import ConfigError
from vil.workflows.configure import Options, resolve, set_flags

VARIANT = re.compile(r"[A-Za-z0-9][\w,+-]*")  # a name, which becomes part of a folder's name
LONGEST = 40  # characters of a value in a folder's name


class Variant(NamedTuple):
    """A named set of settings. base: config file that replaces the grid's; "" for the grid's."""

    name: str
    settings: tuple[Setting, ...] = ()
    base: str = ""


class Cell(NamedTuple):
    """One run of a grid. values: a setting for each axis."""

    variant: Variant | None
    values: tuple[Setting, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """{key: value as written} for the axes."""
        return {setting.key: setting.value for setting in self.values}


@dataclass(frozen=True)
class Grid:
    """What a sweep runs: each variant with each combination of the values of all axes.

    config: the base, None for the defaults. fixed: settings of all runs. axes: {key: a setting for
    each value}. flags, imports: see `vil.workflows.configure.Options`.
    """

    config: CfgNode | str | None = None
    fixed: tuple[Setting, ...] = ()
    axes: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()

    def cells(self) -> Iterator[Cell]:
        """Yield all cells. The last axis varies fastest. None if there is nothing to combine."""
        if not (self.axes or self.variants):
            return
        for variant in self.variants or (None,):
            for values in itertools.product(*self.axes.values()):
                yield Cell(variant, values)

    def base(self) -> CfgNode:
        """Return the frozen config with the settings of all runs."""
        return self._resolve(self.config, self.fixed)

    def resolve(self, cell: Cell) -> CfgNode:
        """Return the frozen config of a cell. Raises ConfigError for an unknown key or a value that
        is not allowed."""
        own = cell.variant.settings if cell.variant else ()
        config = (cell.variant and cell.variant.base) or self.config
        return self._resolve(config, (*self.fixed, *own, *cell.values))

    def _resolve(self, config: CfgNode | str | None, settings: Sequence[Setting]) -> CfgNode:
        options = Options(settings, self.flags, self.imports)
        if isinstance(config, CfgNode):
            return override(config, options.words, set_flags(options))
        return resolve(config, options)[0]

    def name(self, cell: Cell, *, without: Sequence[str] = ()) -> str:
        """Return the name of a cell, such as linformer-seed_0. It depends on its own values and on
        the names of the axes only. without: keys to leave out."""
        parts = [cell.variant.name.replace(",", "_")] if cell.variant else []
        for key, value in cell.settings.items():
            if key not in without:
                parts.append(f"{short_key(key, self.axes).lower()}_{slug(value)}")
        return "-".join(parts)


def is_axis(setting: Setting) -> bool:
    """Return whether a setting has several values: a list of lists for a key that takes a list, a
    list for any other key."""
    default = KEYS[setting.key].default if setting.key in KEYS else None
    if not isinstance(setting.value, list):
        return False
    takes_list = isinstance(default, list | tuple)
    return not takes_list or any(isinstance(item, list) for item in setting.value)


def with_fixed(grid: Grid, setting: Setting) -> Grid:
    """Return the grid with a setting of all runs, which replaces an axis of that key."""
    if setting.key == "OUTPUT_DIR":
        raise ConfigError(f"{setting.where}: OUTPUT_DIR: the runs lie in the folder of --output")
    axes = {key: values for key, values in grid.axes.items() if key != setting.key}
    return replace(grid, fixed=(*grid.fixed, setting), axes=axes)


def with_axis(grid: Grid, setting: Setting) -> Grid:
    """Return the grid with an axis, which replaces a fixed value of that key."""
    key, values, where = setting
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: {key}: expected a list of values, got {values!r:.80}")
    if twice := [value for i, value in enumerate(values) if value in values[:i]]:
        raise ConfigError(f"{where}: {key}: {plain(twice[0])!r} is given twice")
    axis = tuple(Setting(key, value, where) for value in values)
    fixed = tuple(other for other in grid.fixed if other.key != key)
    return replace(grid, fixed=fixed, axes={**grid.axes, key: axis})


def check_grid(grid: Grid) -> None:
    """Raise ConfigError for a bad name of a variant, or a key whose value would have no effect."""
    for variant in grid.variants:
        if not VARIANT.fullmatch(variant.name):
            raise ConfigError(
                f"variant {variant.name!r}: expected a name of letters, digits, _ , + and -"
            )
        for setting in variant.settings:
            if setting.key in grid.axes:
                other = grid.axes[setting.key][0].where
                raise ConfigError(
                    f"{setting.where}: {setting.key} is set by the variant {variant.name} and "
                    f"swept too ({other}): leave one of them out"
                )
    set_by = [{setting.key for setting in variant.settings} for variant in grid.variants]
    for setting in grid.fixed:
        if set_by and all(setting.key in keys for keys in set_by):
            raise ConfigError(
                f"{setting.where}: {setting.key} has no effect: every variant sets it"
            )


# Names


def short_key(key: str, keys: Sequence[str]) -> str:
    """Return the shortest end of a dotted key that no other of the keys has."""
    words = key.split(".")
    for length in range(1, len(words)):
        end = ".".join(words[-length:])
        if not any(other != key and f".{other}".endswith(f".{end}") for other in keys):
            return end
    return key


def plain(value: Any) -> str:
    """Return a value as text: the items of a list joined by commas."""
    return ",".join(map(plain, value)) if isinstance(value, list) else str(value)


def slug(value: Any) -> str:
    """Return a value for a folder's name: letters, digits and . + - only, other characters as _.
    A long value is cut and followed by a digest."""
    text = re.sub(r"[^A-Za-z0-9.+-]+", "_", plain(value)).strip("_") or "none"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 5]}-{digest(plain(value))}"


def digest(text: str) -> str:
    """Return four characters that distinguish texts."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:4]
