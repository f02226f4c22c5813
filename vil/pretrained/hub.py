"""Models in a folder of the Hub's layout: config.json, model.safetensors and a README.md.

The same folder loads with timm for a named model (`timm.create_model("local-dir:FOLDER",
pretrained=True)`, once vil.integrations.timm_register is imported) and here for any: config.json
has timm's keys and ours.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vil.models.arch import StageSpec, format_attention, parse_arch
from vil.models.registry import ARCHS
from vil.models.vision_longformer import MsViT, pair
from vil.pretrained.load_weights import classes_after, load_weights
from vil.pretrained.model_card import build_described, describe
from vil.pretrained.state_dict_io import read_about, write_weights
from vil.utils.atomic_write import replace_text
from vil.utils.errors import CheckpointError, one_line

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
PATTERNS = [CONFIG, WEIGHTS]
# what timm says itself, or is a matter of training
OF_TIMM = ("arch", "in_chans", "num_classes", "drop_rate", "attn_drop_rate", "drop_path_rate",
           "grad_checkpoint")  # fmt: skip


def save_pretrained(
    model: MsViT,
    folder: str | Path,
    *,
    transform: Mapping | None = None,
    classes: Sequence[str] | None = None,
    source: Path | None = None,
) -> None:
    """Write the model into a folder, which is made. See `describe` for the arguments.

    Raises CheckpointError where it cannot be written.
    """
    folder = Path(folder)
    about = describe(model, transform=transform, classes=classes, source=source)
    write_weights(folder / WEIGHTS, model.state_dict(), about)
    config = _config(model, about)
    try:
        replace_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")
        if not (folder / CARD).exists():  # it may have been written by hand
            replace_text(folder / CARD, _card(config))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from None


def from_pretrained(
    source: str | Path, *, head: str = "keep", rule: str = "linear", **settings
) -> MsViT:
    """The model in a folder, in a file of `vil convert`, or in a repository of the Hub.

    settings replace those it was saved with (img_size, num_classes, drop_path_rate, ...); positions
    are then resized by `rule`, and another number of classes needs `head`, see `load_weights`. Its
    `notes` have the transform and the classes, where they are known.
    Raises CheckpointError for what is absent, damaged or no model of ours, ValueError for an
    unknown setting.
    """
    path = Path(source)
    if path.is_file():
        about, weights = read_about(path), path
        if about is None:
            raise CheckpointError(
                f"{path} does not say what model it is of: vil convert it, "
                "or vil.get_model(NAME, weights=FILE)"
            )
    else:
        if not path.exists() and source in ARCHS:
            raise CheckpointError(
                f"{source} is a named model: vil.get_model({str(source)!r}, weights='DEFAULT')"
            )
        path = path if path.exists() else _fetch(str(source))
        about, weights = _described_in(path), path / WEIGHTS
    size = settings.pop("img_size", None)
    model = build_described(about, **settings)
    load_weights(model, weights, head=head, rule=rule)
    model.notes["classes"] = classes_after(head, model.notes.get("classes"))
    if size is not None:  # from the grids it was made for: a table alone does not say them
        model.resize_positions(size, rule)
    return model.eval()


def zoo_name(model: MsViT) -> str | None:
    """The named model that this is, whatever its windows; None for others."""

    def shape(stages: Sequence[StageSpec]) -> list[StageSpec]:
        return [replace(stage, attn_size=1) for stage in stages]

    attention = format_attention(model.specs)
    found = (
        n for n, arch in ARCHS.items() if shape(parse_arch(arch, attention)) == shape(model.specs)
    )
    return next(found, None)


def _config(model: MsViT, about: Mapping) -> dict:
    """timm's keys, and ours under `vil`. timm knows architectures by name: another one's folder
    loads here alone."""
    settings = about["model"]
    args = {key: value for key, value in settings.items() if key not in OF_TIMM}
    return {
        "architecture": zoo_name(model) or "msvit",
        "num_classes": settings["num_classes"],
        "num_features": model.num_features,
        "pretrained_cfg": {
            "input_size": [settings["in_chans"], *pair(settings["img_size"])],
            "num_classes": settings["num_classes"],
            "fixed_input_size": False,
            "first_conv": "stages.0.embed.proj",
            "classifier": "head",
            **(about["transform"] or {}),
        },
        "model_args": {
            **args,
            "windows": [stage.attn_size for stage in model.specs],
        },
        "label_names": about["classes"],
        "vil": dict(about),
    }


def _card(config: Mapping) -> str:
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


def _described_in(folder: Path) -> dict:
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["vil"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {CONFIG}: not saved by save_pretrained "
            "(of a run: vil convert RUN FOLDER/)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be used: {one_line(error)}") from None
    return about


def _fetch(repository: str) -> Path:
    """A repository of the Hub, or its copy on this machine."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=PATTERNS))
    except Exception as error:  # of the network, of the name, of the server
        raise CheckpointError(
            f"there is no folder {repository}, and the Hub's repository of that name cannot be "
            f"fetched: {one_line(error)}"
        ) from None
