"""Trained weights by name, as torchvision has them: ViL_Tiny_Weights.IMAGENET1K_V1 and its like.

A class for each model and a member for each file, with `url`, `sha256`, `transforms()` (what turns
a picture into the model's input) and `meta` (parameters, multiply-accumulates, metrics, recipe,
classes, and whether the metrics are "published" by the authors or "measured" by us). DEFAULT is the
member with the best published accuracy.

Ours, ViL_Nano_Weights.DIGITS, ship with the package. published.csv has the authors', whose storage
is gone: a download fails, and says what to do with a copy of the file.
"""

import csv
import urllib.error
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.data import create_transform
from torch import Tensor
from torchvision.models import ResNet18_Weights, Weights, WeightsEnum
from torchvision.transforms import Compose

from vil.pretrained.model_card import TRANSFORM
from vil.pretrained.state_dict_io import read_weights
from vil.utils.atomic_write import sha256_of
from vil.utils.errors import CheckpointError
from vil.utils.lookup import lookup
from vil.utils.rgb import to_rgb

HERE = Path(__file__).parent
SHIPPED = HERE.parent / "weights"
STORAGE = "https://penzhanwu2.blob.core.windows.net/imagenet/msvit"
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLASSES_22K = 21841
IMAGENET_CLASSES = ResNet18_Weights.DEFAULT.meta["categories"]


class Row(NamedTuple):
    """A line of published.csv: texts as published, empty where nothing was; then what we counted
    and what the config says, which tests/test_model_zoo.py compares."""

    section: str
    model: str
    config: str  # below configs/
    pretraining: str
    top1: str
    top5: str
    parameters: str  # millions
    macs: str  # thousand millions
    folder: str  # of the weights, below STORAGE
    why: str  # the reason why a count differs, a key of docs/zoo_reasons.py
    weights: str  # class and member, empty for the study of attentions
    size: str  # of the image, in pixels
    crop_pct: str
    interpolation: str
    windows: str  # of each stage, by slashes
    counted_parameters: str
    counted_macs: str


def read_rows() -> list[Row]:
    with (HERE / "published.csv").open(encoding="utf-8", newline="") as file:
        return [Row(**line) for line in csv.DictReader(file)]


class ViLWeights(WeightsEnum):
    """torchvision's class of weights, with the SHA-256 of the file and what to do without one."""

    @property
    def sha256(self) -> str | None:
        """Of the file; None where nobody has published it."""
        return self.meta["sha256"]

    def get_state_dict(self, progress: bool = True, check_hash: bool = True) -> dict[str, Tensor]:
        """The weights, downloaded into torch.hub's folder if they are not shipped.

        Raises CheckpointError where they cannot be fetched, or are not what they should be.
        """
        return read_weights(self.file(progress, check_hash))

    def file(self, progress: bool = True, check_hash: bool = True) -> Path:
        """Where the weights are, as for `get_state_dict`."""
        file = Path(self.url)
        if self.url.startswith("https://"):
            name = f"{type(self).__name__}-{self.name}.pth"
            file = Path(torch.hub.get_dir(), "checkpoints", name)
            if not file.exists():
                self._download(file, progress)
        if check_hash and self.sha256 and (digest := sha256_of(file)) != self.sha256:
            raise CheckpointError(
                f"{file} is damaged: its SHA-256 is {digest}, not {self.sha256} ({self!r})"
            )
        return file

    def _download(self, file: Path, progress: bool) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(self.url, str(file), progress=progress)
        except (OSError, urllib.error.URLError) as error:
            raise CheckpointError(
                f"{self!r} cannot be fetched from {self.url} ({error}); with a copy of the file: "
                "vil convert FILE OUT.safetensors, then weights='OUT.safetensors', or for timm "
                "pretrained_cfg_overlay=dict(file='OUT.safetensors')"
            ) from None


def _published(row: Row) -> Weights:
    only_22k, size = row.section == "22K", int(row.size)
    metrics = {"acc@1": float(row.top1), "acc@5": float(row.top5)} if row.top1 else {}
    return Weights(
        url=f"{STORAGE}/{row.folder}/model_best.pth",
        transforms=_transforms(size, float(row.crop_pct), row.interpolation, **IMAGENET),
        meta={
            "status": "published",
            "metrics": {"ImageNet-1K": metrics} if metrics else {},
            "pretraining": f"ImageNet-{row.pretraining}",
            "recipe": f"configs/{row.config}",
            "num_params": int(row.counted_parameters),
            "macs": int(row.counted_macs),
            "sha256": None,
            "categories": None if only_22k else IMAGENET_CLASSES,
            "build": {
                "img_size": size,
                "num_classes": CLASSES_22K if only_22k else len(IMAGENET_CLASSES),
                "windows": tuple(map(int, row.windows.split("/"))),
            },
        },
    )


def _transforms(size: int, crop_pct: float, interpolation: str, **normalisation: Any) -> partial:
    """timm's evaluation transform: resize the short side, cut out the middle, normalise."""
    return partial(
        picture_transform,
        input_size=size,
        crop_pct=crop_pct,
        interpolation=interpolation,
        **normalisation,
    )


def picture_transform(**settings: Any) -> Compose:
    """A picture of any kind, as RGB, through timm's transform."""
    return Compose([to_rgb, create_transform(**settings)])


DIGITS = Weights(
    url=str(SHIPPED / "vil_nano_digits.safetensors"),
    transforms=_transforms(64, 1.0, "bicubic", mean=(0.3,) * 3, std=(0.35,) * 3),
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
def tables() -> dict[str, type[ViLWeights]]:
    """The classes, by name."""
    members: dict[str, dict[str, Weights]] = defaultdict(dict)
    members["ViL_Nano_Weights"]["DIGITS"] = DIGITS
    for row in read_rows():
        if row.weights:
            kind, member = row.weights.split(".")
            members[kind][member] = _published(row)
    for found in members.values():
        found["DEFAULT"] = max(found.values(), key=_accuracy)
    return {kind: ViLWeights(kind, found, module=__name__) for kind, found in members.items()}


def _accuracy(weights: Weights) -> float:
    """Top-1 as published or measured; 0 for those without, of ImageNet-22K alone."""
    return max((figures["acc@1"] for figures in weights.meta["metrics"].values()), default=0.0)


def __getattr__(name: str) -> type[ViLWeights]:
    if name.endswith("_Weights") and name in tables():
        return tables()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_weight(name: str) -> ViLWeights:
    """A member by its full name, such as ViL_Tiny_Weights.IMAGENET1K_V1; ValueError for others."""
    kind, _, member = name.partition(".")
    return lookup(
        lookup(tables(), kind, "class of weights").__members__, member, f"member of {kind}"
    )


def get_model_weights(model: str) -> type[ViLWeights]:
    """The class of weights of a named model; ValueError for a model without weights."""
    return lookup(by_model(), model, "model with weights")


@cache
def by_model() -> dict[str, type[ViLWeights]]:
    """ViL_Medium_Deep_RPB_Weights, ... by vil_medium_deep_rpb, ..."""
    return {kind.removesuffix("_Weights").lower(): found for kind, found in tables().items()}


def notes_of(weights: ViLWeights) -> dict:
    """What goes with a model that has them: transform and classes."""
    known = weights.transforms.keywords
    transform = {key: known[key] for key in TRANSFORM}
    return {"transform": transform, "classes": weights.meta["categories"]}
