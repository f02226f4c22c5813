"""Derive a config from the description inside a weight file that `vil convert` wrote.

A command that loads this weight file needs no config file, only the option `MODEL.MODEL_PATH FILE`.
"""

from pathlib import Path

from vil.config import ConfigError
from vil.layers.attention import ATTENTIONS
from vil.tasks import TASKS
from vil.tasks.weight_files import INTERPOLATION, transform_keys

# {model setting: config key}
SETTINGS = {
    "arch": "MODEL.VIT.MSVIT.ARCH",
    "attention": "MODEL.VIT.MSVIT.ATTN_TYPE",
    "img_size": "INPUT.IMAGE_SIZE",
    "in_chans": "INPUT.CHANNELS",
    "num_classes": "DATA.NUM_CLASSES",
    "norm_embed": "MODEL.VIT.NORM_EMBED",
    "norm_eps": "MODEL.VIT.MSVIT.LN_EPS",
    "avg_pool": "MODEL.VIT.AVG_POOL",
    "pos_resize": "MODEL.VIT.POS_RESIZE",
    "reversible": "MODEL.VIT.REVERSIBLE",  # not in files of earlier versions
}
ATTENTION = {
    (name, argument): key
    for name, entry in ATTENTIONS.items()
    for argument, key in entry.key_names.items()
    if argument != "backend"  # depends on the machine, not on the weights
}


def describe_weights(weights: str) -> tuple[list[str], list[str] | None]:
    """Read the model description in a weight file.

    weights: a value for MODEL.MODEL_PATH. Returns the config options that define the model, as
    KEY=VALUE strings, and the class names, or None if the file has none. Returns ([], None) without
    a weight file or description. Raises ConfigError if a config cannot represent the described
    model.
    """
    from vil.pretrained.state_dict_io import find_weights, read_metadata

    file = find_weights(Path(weights))
    about = read_metadata(file) if file.is_file() else None
    if about is None:
        return [], None
    model, transform = about["model"], about["transform"] or {}
    sides = model["img_size"]
    sides = [sides] if isinstance(sides, int) else sides
    if len(set(sides)) > 1:
        raise ConfigError(
            f"{file} is for images of {sides} pixels, but INPUT.IMAGE_SIZE supports only square "
            "images: use --config-file with a config that sets a square size"
        )
    if transform.get("interpolation", "bicubic") not in INTERPOLATION:
        raise ConfigError(
            f"{file} uses the interpolation {transform['interpolation']!r}, but "
            f"INPUT.INTERPOLATION supports only {' and '.join(INTERPOLATION)}: use --config-file "
            "with a config that sets one of them"
        )
    model = {**model, "img_size": sides[0]}
    own = model["attention_args"] or {}
    found = {key: model[name] for name, key in SETTINGS.items() if name in model}
    if model["num_classes"] == 0:  # a file without a head
        del found["DATA.NUM_CLASSES"]
    present = model["attention"].replace("/", ",").split(",")
    read = {key for (kind, _), key in ATTENTION.items() if kind in present}
    for (kind, name), key in ATTENTION.items():
        if key in read and name in own.get(kind, {}):
            found[key] = own[kind][name]
    found |= transform_keys(transform)
    if task := about.get("task"):
        entry = TASKS.get(task["name"])
        learned = entry.load().learned_keys if entry else ()
        if unknown := [key for key in task["settings"] if key not in learned]:
            raise ConfigError(
                f"{file}: its model card sets {unknown[0]:.80}, which TASK {task['name']} does not "
                "learn from its training set: convert the checkpoint again"
            )
        found |= {"TASK": task["name"], **task["settings"]}
    return [f"{key}={value}" for key, value in found.items()], about["classes"]
