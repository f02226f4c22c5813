"""Weight enums in the style of torchvision, such as ViL_Tiny_Weights.IMAGENET1K_V1.

There is one enum class per model, with one member per weight file. A member has `url`, `sha256`,
`transforms()`, which builds the input transform, and the dict `meta` with metrics, number of
parameters, config file and class names. `meta["status"]` is "published" if the metrics are from the
paper's authors, and "measured" if they were measured with this package. DEFAULT is the member with
the best accuracy.

The file of ViL_Nano_Weights.DIGITS ships with the package. The server of all other files is
offline, so downloads fail with an error that explains how to use a local copy.
"""

import csv
import urllib.error
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor
from torchvision.models import ResNet18_Weights, Weights, WeightsEnum
from torchvision.transforms import Compose

from vil.pretrained.model_card import TRANSFORM
from vil.pretrained.state_dict_io import read_weights
from vil.utils.atomic_write import sha256_of
from vil.utils.errors import CheckpointError
from vil.utils.lookup import lookup
from vil.utils.rgb import WHITE, to_rgb

HERE = Path(__file__).parent
SHIPPED = HERE.parent / "weights"
STORAGE = "https://penzhanwu2.blob.core.windows.net/imagenet/msvit"
IMAGENET = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
CLASSES_22K = 21841
IMAGENET_CLASSES = ResNet18_Weights.DEFAULT.meta["categories"]


class Row(NamedTuple):
    """A row of published.csv, which describes one published weight file. All fields are text.

    The fields top1, top5, parameters and macs are the values that the paper's authors published, or
    "" if they published none.
    """

    section: str
    model: str
    config: str  # below configs/
    pretraining: str
    top1: str
    top5: str
    parameters: str  # millions
    macs: str  # billions
    folder: str  # of the weights, below STORAGE
    why: str  # why a count differs, a key of docs/zoo_reasons.py
    weights: str  # enum class and member; empty in the section "attention"
    size: str  # image side in pixels
    crop_pct: str
    interpolation: str
    windows: str  # of each stage, separated by slashes
    counted_parameters: str
    counted_macs: str


def read_rows() -> list[Row]:
    """Read published.csv, the table of the weights that the paper's authors published."""
    with (HERE / "published.csv").open(encoding="utf-8", newline="") as file:
        return [Row(**line) for line in csv.DictReader(file)]


class ViLWeights(WeightsEnum):
    """Base class of the weight enums, derived from torchvision's WeightsEnum. It adds the SHA-256
    of each file. If a download fails, it raises an error that explains how to use a local copy."""

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the weight file as hex digits; None if it is unknown."""
        return self.meta["sha256"]

    def get_state_dict(self, progress: bool = True, check_hash: bool = True) -> dict[str, Tensor]:
        """Return the state dict of the weight file.

        The file is downloaded to torch.hub's folder, unless it is already there or ships with vil.

        progress: show a progress bar. check_hash: compare the file's SHA-256 with the known one.
        Raises CheckpointError if the download fails or the hash differs.
        """
        return read_weights(self.file(progress, check_hash))

    def file(self, progress: bool = True, check_hash: bool = True) -> Path:
        """Return the path of the weight file. Downloads the file if it is not on this machine yet.

        progress, check_hash: see `get_state_dict`. Raises CheckpointError if the download fails or
        the hash differs.
        """
        file = Path(self.url)
        if self.url.startswith("https://"):
            file = Path(
                torch.hub.get_dir(), "checkpoints", f"{type(self).__name__}-{self.name}.pth"
            )
            if not file.exists():
                self._download(file, progress)
        if check_hash and self.sha256 and (digest := sha256_of(file)) != self.sha256:
            raise CheckpointError(
                f"{file} is damaged: its SHA-256 is {digest}, expected {self.sha256} for {self!r}"
            )
        return file

    def _download(self, file: Path, progress: bool) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(self.url, str(file), progress=progress)
        except (OSError, urllib.error.URLError) as error:
            raise CheckpointError(
                f"{self!r} cannot be downloaded from {self.url} ({error}). If you have a copy of "
                f"the file, run vil convert FILE OUT.safetensors --model {self!r}, then pass "
                "weights='OUT.safetensors' to vil.get_model, or "
                "pretrained_cfg_overlay=dict(file='OUT.safetensors') to timm.create_model"
            ) from None


def _published(row: Row) -> Weights:
    size, categories = int(row.size), None if row.section == "22K" else IMAGENET_CLASSES
    metrics = {"acc@1": float(row.top1), "acc@5": float(row.top5)} if row.top1 else {}
    return Weights(
        url=f"{STORAGE}/{row.folder}/model_best.pth",
        transforms=partial(
            image_transform,
            input_size=size,
            crop_pct=float(row.crop_pct),
            interpolation=row.interpolation,
            **IMAGENET,
        ),
        meta={
            "status": "published",
            "metrics": {"ImageNet-1K": metrics} if metrics else {},
            "pretraining": f"ImageNet-{row.pretraining}",
            "recipe": f"configs/{row.config}",
            "num_params": int(row.counted_parameters),
            "macs": int(row.counted_macs),
            "sha256": None,
            "categories": categories,
            "build": {
                "img_size": size,
                "num_classes": len(categories) if categories else CLASSES_22K,
                "windows": tuple(map(int, row.windows.split("/"))),
            },
        },
    )


def image_transform(
    background: Sequence[int] = WHITE, value_range: Sequence[float] = (), **settings: Any
) -> Compose:
    """Build an input transform for PIL images: conversion to RGB, then timm's evaluation transform.
    background, value_range: see `to_rgb`. settings: arguments of `timm.data.create_transform`."""
    convert = partial(to_rgb, value_range=value_range, background=background)
    return Compose([convert, create_transform(**settings)])


DIGITS = Weights(
    url=str(SHIPPED / "vil_nano_digits.safetensors"),
    transforms=partial(
        image_transform,
        input_size=64,
        crop_pct=1.0,
        interpolation="bicubic",
        mean=(0.3,) * 3,
        std=(0.35,) * 3,
    ),
    meta={
        "status": "measured",  # the last epoch of the recipe with OMP_NUM_THREADS=1, then converted
        "metrics": {"digits": {"acc@1": 98.06, "acc@5": 100.0}},
        "pretraining": "",
        "recipe": "configs/digits/vil_nano.yaml",
        "num_params": 356_814,
        "macs": 18_159_424,
        "sha256": "85e24ed7fcc1e348afbe911b8a443e83114c19a11ed06e787ee941df326c3493",
        "categories": [str(digit) for digit in range(10)],
        "build": {"img_size": 64, "num_classes": 10},
    },
)


@cache
def load_weight_classes() -> dict[str, type[ViLWeights]]:
    """Create the weight enums of all models. Returns {class name: enum}, for example with the key
    "ViL_Tiny_Weights"."""
    members: dict[str, dict[str, Weights]] = defaultdict(dict)
    members["ViL_Nano_Weights"]["DIGITS"] = DIGITS
    for row in read_rows():
        if row.weights:
            name, member = row.weights.split(".")
            members[name][member] = _published(row)
    for by_name in members.values():  # weights of ImageNet-22K without fine-tuning have no metrics
        by_name["DEFAULT"] = max(
            by_name.values(),
            key=lambda w: max((m["acc@1"] for m in w.meta["metrics"].values()), default=0.0),
        )
    return {name: ViLWeights(name, by_name, module=__name__) for name, by_name in members.items()}


def __getattr__(name: str) -> type[ViLWeights]:
    if name.endswith("_Weights") and name in load_weight_classes():
        return load_weight_classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_weight(name: str) -> ViLWeights:
    """Return a weight enum member by its full name, such as ViL_Tiny_Weights.IMAGENET1K_V1.

    Raises ValueError for an unknown name.
    """
    cls, _, member = name.partition(".")
    members = lookup(load_weight_classes(), cls, "class of weights").__members__
    return lookup(members, member, f"member of {cls}")


def get_model_weights(model: str) -> type[ViLWeights]:
    """Return the weight enum of a model, such as ViL_Tiny_Weights for "vil_tiny". Raises ValueError
    if the model has no weights."""
    return lookup(weight_classes_by_model(), model, "model with weights")


@cache
def weight_classes_by_model() -> dict[str, type[ViLWeights]]:
    """Return {model name: weight enum of the model}, for example with the key "vil_tiny"."""
    classes = load_weight_classes().items()
    return {name.removesuffix("_Weights").lower(): cls for name, cls in classes}


def get_notes(weights: ViLWeights) -> dict:
    """Return the value of `MsViT.notes` for published weights: {"transform": settings of the input
    transform, "classes": class names, or None if they are unknown}."""
    settings = weights.transforms.keywords
    transform = {key: settings[key] for key in TRANSFORM if key in settings}
    return {"transform": transform, "classes": weights.meta["categories"]}
