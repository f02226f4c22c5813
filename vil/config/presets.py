"""Presets: named sets of config values for a purpose. Files and the command line override them.

The presets are the YAML files in configs/_presets_. Comments in these files explain the values.
"""

from collections.abc import Iterable, Mapping

from yacs.config import CfgNode

from vil.config.coercion import coerce
from vil.config.defaults import KEYS, leaves
from vil.config.yaml_source import ConfigError, Setting, from_file, packaged_root
from vil.utils.lookup import lookup

FOLDER = "_presets_"
# {key: keys that depend on it}. If a file or the command line sets the key, the preset's values of
# the dependent keys are dropped: they belong to the preset's learning rate, not to the recipe's.
DEPENDENT = {"OPTIM.LR": ("OPTIM.LR_REFERENCE_BATCH", "OPTIM.LR_SCALING", "SOLVER.MIN_LR")}


def read_preset(name: str) -> list[Setting]:
    """Return the settings of a preset. Raises ConfigError, with the nearest name, for an unknown
    preset."""
    files = {file.stem: file for file in sorted((packaged_root() / FOLDER).glob("*.yaml"))}
    try:
        file = lookup(files, name, "preset")
    except ValueError as error:
        raise ConfigError(f"--preset: {error}") from None
    where = f"preset {name}"
    return [s._replace(where=where) for s in from_file(file) if s.key != "VERSION"]


def below(preset: Iterable[Setting], others: Iterable[Setting]) -> list[Setting]:
    """Return the settings of a preset, without those that make no sense with the `others`.

    For example, OPTIM.LR_REFERENCE_BATCH is dropped if `others` sets OPTIM.LR. DEPENDENT lists all
    such cases. others: settings of files and the command line, which override the preset.
    """
    keys = {setting.key for setting in others}
    dropped = {name for key, names in DEPENDENT.items() if key in keys for name in names}
    return [setting for setting in preset if setting.key not in dropped]


def describe_preset(name: str, cfg: CfgNode, sources: Mapping[str, str]) -> list[str]:
    """Describe a preset. Returns a title line, and then one line for each key of the preset.

    A key's line shows its value in `cfg`. If the preset does not set this value, the line also
    shows the preset's value, if different, and why it is not used: a file or option that sets the
    key, or a key of DEPENDENT that is set. cfg, sources: the result of `vil.config.load_config`
    with this preset.
    """
    owner = {other: key for key, others in DEPENDENT.items() for other in others}
    lines, values = [f"preset {name}:"], leaves(cfg)
    for key, text, where in read_preset(name):
        value, now = coerce(text, KEYS[key].default), values[key]
        source = sources.get(key)
        why = f"from {source}" if source else f"because {owner[key]} is set"
        if source == where:
            lines.append(f"  {key} {now}")
        else:
            lines.append(f"  {key} {now}{'' if now == value else f', not {value}'} ({why})")
    return lines
