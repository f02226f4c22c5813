"""Make a config from a file and overrides, from the folder of a run, or from a weight file."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from yacs.config import CfgNode

from vil.config import describe_preset, load_config, override
from vil.config.defaults import KEYS
from vil.config.yaml_source import Setting, from_mapping, from_options
from vil.utils.errors import CheckpointError, ConfigError
from vil.utils.plural import plural

log = logging.getLogger(__name__)

# {key: environment variable}, as in the 2021 code. Every other source overrides these.
ENVIRONMENT = {"DATA.PATH": "PT_DATA_DIR", "OUTPUT_DIR": "PT_OUTPUT_DIR"}

Overrides = Mapping[str, Any] | Iterable[str]


class Options(NamedTuple):
    """Changes to a config.

    words: config options, each a Setting, one string "KEY=VALUE", or two strings "KEY" and "VALUE".
    flags: {config key: value}, which override `words`; a value of None is ignored.
    imports: Python files to run before the config is read. They may register components.
    preset: name of a preset. Only the environment and the defaults have lower precedence.
    """

    words: Sequence[str | Setting] = ()
    flags: Mapping[str, str | Path | None] = {}
    imports: Sequence[str] = ()
    preset: str | None = None


class ConfigWithClasses(NamedTuple):
    """Config of a model, and the names of the classes that the model predicts.

    class_names: () if the names are unknown. If FINETUNE.HEAD selects rows of the head, only the
    names of these rows.
    """

    cfg: CfgNode
    class_names: Sequence[str] = ()


def as_options(overrides: Overrides | None) -> list[str | Setting]:
    """Convert overrides to a list of config options.

    A dict {KEY: value} is converted to a list of settings, an iterable of KEY=VALUE strings to a
    list of these strings, and None to an empty list.
    """
    if overrides is None:
        return []
    if isinstance(overrides, Mapping):
        return list(from_mapping(overrides))
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise ConfigError(f"overrides: expected a dict or a list of KEY=VALUE, got {overrides!r}")
    return list(overrides)


def make_config(
    config: CfgNode | str | Path | None = None,
    overrides: Overrides | None = None,
    *,
    output_dir: str | Path | None = None,
    data: str | Path | None = None,
    imports: Sequence[str] = (),
    preset: str | None = None,
) -> CfgNode:
    """Make a frozen config.

    config: a file or a CfgNode; None for the defaults.
    output_dir, data: values for OUTPUT_DIR and DATA.PATH.
    imports: Python files to run first, which may register components. Ignored if `config` is a
    CfgNode.
    preset: name of a preset, a set of values that the file and the other arguments override. The
    final value of each of its keys is logged.

    Raises ConfigError if a preset is used with a CfgNode.
    """
    if not isinstance(config, CfgNode | str | os.PathLike | None):
        raise ConfigError(
            f"config: expected a file, a packaged config or a CfgNode, got {config!r:.80}: pass "
            "changes to the config as overrides"
        )
    flags = {"OUTPUT_DIR": output_dir, "DATA.PATH": data}
    options = Options(as_options(overrides), flags, imports, preset)
    if not isinstance(config, CfgNode):
        cfg, sources = resolve(None if config is None else str(config), options)
        for line in describe_preset(preset, cfg, sources) if preset else ():
            log.info("%s", line)
        return cfg
    if preset:
        raise ConfigError(
            f"preset {preset!r} has no effect on a CfgNode, which already has a value for every "
            "key: pass a config file instead, or make the CfgNode with the preset"
        )
    return override(config, options.words, set_flags(options.flags))


def resolve(config_file: str | None, options: Options) -> tuple[CfgNode, dict[str, str]]:
    """Make a config from a file, options and environment variables.

    config_file: path of the file; None for the defaults. Returns (cfg, sources): the frozen config,
    and {config key: source of its value, such as "file:line"}. Keys with default values are not in
    `sources`.
    """
    found = {key: os.environ[name] for key, name in ENVIRONMENT.items() if os.environ.get(name)}
    return load_config(
        config_file,
        options.words,
        fallbacks=found,
        flags=set_flags(options.flags),
        imports=options.imports,
        preset=options.preset,
    )


def set_flags(flags: Mapping[str, str | Path | None]) -> dict[str, str]:
    """Return {config key: value as a string} for the flags that are not None."""
    return {key: str(value) for key, value in flags.items() if value is not None}


def saved_config(options: Options) -> str | None:
    """Return the path of the config.yaml in OUTPUT_DIR, or None if there is none.

    OUTPUT_DIR is taken from the options, otherwise from the environment, otherwise it has its
    default. No config file is read, and other keys are not checked.
    """
    key = "OUTPUT_DIR"
    folder = (
        options.flags.get(key)
        or last_value(options.words, key)
        or os.environ.get(ENVIRONMENT[key])
        or KEYS[key].default
    )
    file = Path(folder, "config.yaml")
    return str(file) if file.is_file() else None


def last_value(words: Sequence[str | Setting], key: str) -> str | None:
    """Return the last value of a key in config options, or None if they do not set it. words: the
    options, as in `Options`."""
    values = [str(each.value) for each in from_options(words) if each.key == key]
    return values[-1] if values else None


def run_config(
    folder: str | Path,
    options: Options,
    *,
    checkpoint: str = "best",
    weights: str | Path | None = None,
) -> ConfigWithClasses:
    """Return the config and the class names of a run, with MODEL.MODEL_PATH set to a checkpoint.

    checkpoint: "best" or "last". Ignored if `weights` is given.
    weights: path of any checkpoint of the run, or of a file in a checkpoint.

    Raises ConfigError if the folder has no config.yaml, and CheckpointError if the run does not
    have the checkpoint.
    """
    from vil.data.classes import read_class_names
    from vil.engine.checkpoint.save_load import resolve_link
    from vil.pretrained.load_weights import select_classes

    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"--run {folder} is not the folder of a run: it has no config.yaml")
    link = folder / "checkpoints" / checkpoint
    if weights is None and resolve_link(link.parent, checkpoint) is None:
        raise CheckpointError(f"{folder} has no {checkpoint} checkpoint yet")
    # the link, not its checkpoint, which a run that still trains may remove before it is loaded
    path = weights or link
    # the config's FINETUNE.HEAD applies to the run's initial weights, not to its checkpoints
    words = [f"MODEL.MODEL_PATH={path}", "FINETUNE.HEAD=keep"]
    own = Setting("OUTPUT_DIR", str(folder), f"run {folder}")
    options = options._replace(words=[*words, own, *options.words])
    cfg, _ = resolve(str(folder / "config.yaml"), options)
    names = select_classes(cfg.FINETUNE.HEAD, read_class_names(folder / "classes.txt"))
    return ConfigWithClasses(cfg, names or ())


def find_run_config(
    source: str | Path, options: Options, *, checkpoint: str = "best"
) -> ConfigWithClasses | None:
    """Return the config and the class names of the run that a path belongs to, or None.

    source: this path, which is the folder of a run, a checkpoint, or a file in a checkpoint.
    checkpoint: "best" or "last". Ignored if `source` is not the folder of a run.

    MODEL.MODEL_PATH is set to `source` or, for the folder of a run, to its checkpoint.
    """
    from vil.pretrained.state_dict_io import find_run

    folder = find_run(Path(source))
    if folder is None:
        return None
    weights = None if Path(source, "config.yaml").is_file() else source
    return run_config(folder, options, checkpoint=checkpoint, weights=weights)


def source_config(
    source: str | Path, options: Options, *, checkpoint: str = "best"
) -> ConfigWithClasses:
    """Return the config and the class names that belong to trained weights.

    source: the weights, as the folder of a run or as a value for MODEL.MODEL_PATH.
    checkpoint: which weights to use if `source` is the folder of a run, "best" or "last".

    The returned config has MODEL.MODEL_PATH set to these weights.
    """
    check_source(source)
    if Path(source, "config.yaml").is_file():
        return run_config(source, options, checkpoint=checkpoint)
    words = [f"MODEL.MODEL_PATH={source}", *options.words]
    return weights_config(None, options._replace(words=words))


def check_source(source: Any) -> None:
    """Raise ConfigError unless `source` is text or a path."""
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            "source: expected the folder of a run, a weight file, or a name from "
            f"vil.list_models(), got {type(source).__name__}"
        )


def weights_config(
    config_file: str | None, options: Options, default: str | None = None
) -> ConfigWithClasses:
    """Make a config from a config file or, without one, from the weights that `options` sets.

    With a config file, the result has no class names. Without one, the weights in
    MODEL.MODEL_PATH determine the result:

    - a checkpoint of a run: the run's config and class names
    - any other weight file with a description: the config and class names that it describes
    - no weights or no description: the config file `default`, or the default config
    """
    from vil.pretrained.load_weights import select_classes

    class_names = None
    if not config_file:
        from vil.workflows.config_from_weights import describe_weights

        weights, own = last_value(options.words, "MODEL.MODEL_PATH"), []
        if weights:
            if found := find_run_config(weights, options):
                return found
            own, class_names = describe_weights(weights)
        options = options._replace(words=[*own, *options.words])
        config_file = None if own else default
    cfg, _ = resolve(config_file, options)
    return ConfigWithClasses(cfg, select_classes(cfg.FINETUNE.HEAD, class_names) or ())


def read_class_file(file: str | Path, num_classes: int, learned: Sequence[str] = ()) -> list[str]:
    """Read class names from a file with one name per line, in the spelling of the model's names
    `learned`, see `respell`. Raises ConfigError if the file cannot be read or does not have
    `num_classes` lines."""
    from vil.data.classes import respell

    try:
        with open(file, encoding="utf-8-sig", errors="surrogateescape") as lines:
            names = [line.rstrip("\n") for line in lines]
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    if len(names) != num_classes:
        lines = plural(len(names), "line")
        raise ConfigError(f"{file} has {lines}, but DATA.NUM_CLASSES is {num_classes}")
    return respell(names, learned)
