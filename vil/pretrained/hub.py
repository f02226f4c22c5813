"""Save and load models in the folder layout of the Hugging Face Hub.

A folder contains config.json, model.safetensors and README.md. config.json has timm's keys and,
under the key `vil`, the model card: a JSON object from which vil rebuilds the model.

If the architecture is one of `vil.list_models()`, timm can also load the folder: import
vil.integrations.timm_register and call `timm.create_model("local-dir:FOLDER", pretrained=True)`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from timm.layers import to_2tuple

from vil.models.arch import format_attention, parse_arch
from vil.models.registry import ARCHS, replace_windows
from vil.models.vision_longformer import MsViT
from vil.pretrained.card_schema import check_card, check_size, timm_transform
from vil.pretrained.load_weights import load_weights, select_classes
from vil.pretrained.model_card import build_from_card, get_model_args, make_model_card
from vil.pretrained.state_dict_io import read_metadata, write_weights
from vil.utils.atomic_write import replace_text
from vil.utils.downloads import hide_retries
from vil.utils.errors import CheckpointError, one_line, os_error_as

CONFIG, WEIGHTS, README = "config.json", "model.safetensors", "README.md"


def save_pretrained(
    model: MsViT,
    folder: str | Path,
    *,
    transform: Mapping | None = None,
    classes: Sequence[str] | None = None,
    task: Mapping | None = None,
    source: Path | None = None,
) -> None:
    """Save a model to a folder, which is created if it does not exist.

    transform: mean, std, crop_pct and interpolation of input images, as in timm; default: those in
    the model's `notes`.
    classes: class names; default: those in the model's `notes`.
    task: see `make_model_card`; default: that in the model's `notes`.
    source: the file that the weights come from. The model card records its name and SHA-256.

    Raises CheckpointError if the folder cannot be written, and ValueError if no model card can be
    made, see `make_model_card`.
    """
    folder = Path(folder)
    notes = dict(transform=transform, classes=classes, task=task)
    card = make_model_card(model, **notes, source=source)
    config = _make_config(model, card)
    write_weights(folder / WEIGHTS, model.state_dict(), card)
    with os_error_as(CheckpointError, f"{folder} cannot be written"):
        replace_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")
        if not (folder / README).exists():  # keep one written by hand
            replace_text(folder / README, _make_readme(config))


def from_pretrained(
    source: str | Path, *, head: str = "keep", rule: str = "linear", **settings
) -> MsViT:
    """Load a model from a folder, a file written by `vil convert`, or a repository of the Hub.

    source: path of the folder or file, or name of the repository.
    head: "keep" loads the saved head. "new" and "rows:FILE" allow another number of classes, see
    `load_weights`.
    rule: how to resize position embeddings, see `load_weights`.
    settings: arguments of MsViT (img_size, num_classes, drop_path_rate, ...) that replace the saved
    ones.

    The returned model is in eval mode, and its `notes` have the input transform and the class
    names, if known. Raises CheckpointError if the source is missing, damaged or not a model of vil,
    and ValueError for an unknown setting.
    """
    path = Path(source)
    if path.is_file():
        card, weights = read_metadata(path), path
        if card is None:
            raise CheckpointError(
                f"{path} has no model card: run vil convert on this file, "
                "or use vil.get_model(NAME, weights=FILE)"
            )
    else:
        if not path.exists() and source in ARCHS:
            hint = f"vil.get_model({str(source)!r}, weights='DEFAULT')"
            raise CheckpointError(
                f"{source} is the name of a model, not a folder, file or repository: use {hint}"
            )
        path = path if path.exists() else _fetch(str(source))
        card, weights = _read_card(path), path / WEIGHTS
    size = settings.pop("img_size", None)
    model = build_from_card(card, **settings)
    load_weights(model, weights, head=head, rule=rule)
    model.notes["classes"] = select_classes(head, model.notes.get("classes"))
    if size is not None:  # after loading, because the weights have the grids of the card's size
        model.set_input_size(size, rule)
    return model.eval()


def find_model_name(model: MsViT) -> str:
    """Return the name of a model's architecture, such as "vil_tiny", or "msvit" if it is not one of
    the built-in architectures. Window sizes are not compared."""
    attention = format_attention(model.specs)
    wanted = replace_windows("", model.specs, 1)
    for name, arch in ARCHS.items():
        if len(parse_arch(arch)) != len(wanted):  # `attention` may name more stages than `arch`
            continue
        if replace_windows(name, parse_arch(arch, attention), 1) == wanted:
            return name
    return "msvit"


def _make_config(model: MsViT, card: Mapping) -> dict:
    """Return the content of config.json for a model: timm's keys, and the model card under the key
    "vil"."""
    settings = card["model"]
    return {
        "architecture": find_model_name(model),
        "num_classes": settings["num_classes"],
        "num_features": model.num_features,
        "pretrained_cfg": {
            "input_size": [settings["in_chans"], *to_2tuple(settings["img_size"])],
            "num_classes": settings["num_classes"],
            "fixed_input_size": False,
            "first_conv": "stages.0.embed.proj",
            "classifier": "head",
            **timm_transform(card),
        },
        "model_args": get_model_args(card),
        "label_names": card["classes"],
        "vil": dict(card),
    }


def _make_readme(config: Mapping) -> str:
    size = " x ".join(map(str, config["pretrained_cfg"]["input_size"][1:]))
    source = config["vil"].get("source")
    origin = f"Weights of `{source['file']}`, SHA-256 {source['sha256']}." if source else ""
    return f"""\
---
library_name: vil
tags: [image-classification, vision-longformer]
---
# {config["architecture"]}

Multi-scale Vision Longformer (arXiv:2103.15358), {size} px, {config["num_classes"]} classes.
{origin}

    import vil
    model = vil.from_pretrained("this folder or repository")
"""


def _read_card(folder: Path) -> dict:
    try:
        card = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["vil"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {CONFIG}, so it was not saved by save_pretrained "
            "(for the folder of a run, use vil convert RUN NEW_FOLDER/)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        file = folder / CONFIG
        raise CheckpointError(
            f"{file}: cannot read its model card (key 'vil'): {one_line(error)}"
        ) from None
    check_size(check_card(card, folder / CONFIG), folder / WEIGHTS)
    return card


def _fetch(repository: str) -> Path:
    """Download a repository of the Hugging Face Hub, unless it is cached. Returns the local folder.
    Raises CheckpointError if it cannot be downloaded."""
    from huggingface_hub import snapshot_download

    try:
        with hide_retries():
            return Path(snapshot_download(repository, allow_patterns=[CONFIG, WEIGHTS]))
    except Exception as error:  # network, name or server
        raise CheckpointError(
            f"there is no folder {repository}, and a repository with this name cannot be "
            f"downloaded from the Hugging Face Hub: {one_line(error)}"
        ) from None
