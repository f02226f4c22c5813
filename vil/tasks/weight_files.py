"""Find the weights that a path or a name given by the user refers to, and what is recorded of
their training."""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vil.config.defaults import KEYS
from vil.config.yaml_source import read_text, read_yaml
from vil.engine.checkpoint.manifest import find_corruption
from vil.engine.checkpoint.save_load import AVERAGE, resolve_link
from vil.pretrained import dinov2, state_dict_io
from vil.pretrained.catalog import get_weight
from vil.utils.errors import CheckpointError, as_config_error
from vil.utils.lookup import did_you_mean

TRANSFORM = {  # {input transform in a model card: config key}
    "mean": "INPUT.MEAN",
    "std": "INPUT.STD",
    "crop_pct": "INPUT.CROP_PCT",
    "background": "INPUT.BACKGROUND",
    "value_range": "DATA.VALUE_RANGE",
}
INTERPOLATION = {"bilinear": 2, "bicubic": 3}
MEMBER = re.compile(r"ViL_\w+_Weights\.\w+")  # a weights entry of vil.pretrained.catalog


@as_config_error
def find_weights(given: str, data_dir: str) -> Path:
    """Return the path of a weight file or checkpoint folder.

    given: a name such as "ViL_Tiny_Weights.IMAGENET1K_V1", or a path, which may be relative to
    `data_dir`. The path of a run's folder selects the run's best checkpoint. The path of a text
    file `best` or `last` selects the checkpoint that the file names.

    If the checkpoint has averaged weights (OPTIM.EMA), returns the file of these weights. Raises
    CheckpointError if there are no weights, or if the checkpoint is corrupt.
    """
    if MEMBER.fullmatch(given) and not Path(given).exists():
        return get_weight(given).file()
    if given == dinov2.NAME and not Path(given).exists():
        return dinov2.dinov2_file()
    given = Path(given)
    places = list(dict.fromkeys((given, Path(data_dir, given))))
    path = next((place for place in places if place.exists()), None)
    if path is None:
        others = f", nor at {places[1]}" if len(places) > 1 else ""
        near = did_you_mean(*get_close_matches(str(given), [dinov2.NAME], cutoff=0.8))
        raise CheckpointError(f"there are no weights at {given}{others}: check the path{near}")
    if path.name in state_dict_io.POINTERS and path.is_file():
        path = resolve_link(path.parent, path.name)
    elif (path / "config.yaml").is_file():
        path = resolve_link(path / "checkpoints", "best")
    if path is None:
        raise CheckpointError(f"the run in {given} has no best checkpoint yet")
    if path.is_file() or (path / "config.json").is_file():  # a file, a folder of save_pretrained
        return state_dict_io.find_weights(path)
    if reason := find_corruption(path):
        raise CheckpointError(
            f"{path} is damaged, or is not a checkpoint: {reason}; give the folder of a run, the "
            "folder of a checkpoint, or a weight file"
        )
    return path / AVERAGE if (path / AVERAGE).is_file() else path


def transform_keys(transform: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input transform of a model card as {config key: value}."""
    found = {key: transform[name] for name, key in TRANSFORM.items() if name in transform}
    if transform.get("interpolation") in INTERPOLATION:
        found["INPUT.INTERPOLATION"] = INTERPOLATION[transform["interpolation"]]
    return found


def recorded_values(weights: Path, keys: Collection[str]) -> dict[str, Any]:
    """Return {config key: value} of the config that trained weights, for those of `keys` that are
    recorded by its run or, of the input transform and the task, by a model card.

    weights: result of `find_weights`. keys: of texts and of lists of numbers.
    """
    if run := state_dict_io.find_run(weights):
        # not `get_config`, which would run the plug-ins of that run
        settings = read_yaml(read_text(run / "config.yaml"), str(run / "config.yaml"))
        found = {setting.key: setting.value for setting in settings}
    else:
        card = (state_dict_io.read_metadata(weights) if weights.is_file() else None) or {}
        task = card.get("task") or {"name": KEYS["TASK"].default, "settings": {}}
        found = {"TASK": task["name"], **task["settings"]} if card else {}
        found |= transform_keys(card.get("transform") or {})
    lists = {k: list(map(float, v)) for k, v in found.items() if k in keys and type(v) is list}
    return {key: found[key] for key in keys if key in found} | lists
