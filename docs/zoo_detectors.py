"""Write the detection section of the zoo: published COCO results and parameter counts."""

import csv
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from zoo_counts import ROOT, mega, table

import vil
from vil.config import get_config
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT

FILE = Path(__file__).with_name("published_detectors.csv")
INTRODUCTION = """\
These are torchvision's detectors on ViL with relative bias and local attention in all stages. Train
them with `vil train --config-file coco/CONFIG.yaml --data DIR MODEL.MODEL_PATH WEIGHTS`. The
published AP is on val2017. Of the 2021 weights, such as
`msvit_det/visionlongformer/viltiny/maskrcnn1x/model_final.pth`, the backbone can be loaded, but not
the heads, because they are detectron2's.

The published parameters are those of models with absolute position embeddings for 1344 px. They
include the last norm and the head for 1000 classes, which the reference builds but does not use,
and no rows for the background, which some heads of torchvision have. With these, our counts add up
to the published ones (`tests/tasks/detection/test_detector_configs.py`).
"""


class Row(NamedTuple):
    """A published row. parameters: in millions, with an M."""

    config: str
    backbone: str
    method: str
    schedule: str
    pretraining: str
    drop_path: str
    box_ap: str
    mask_ap: str
    parameters: str

    @property
    def detector(self) -> str:
        """Return the name of the config without its schedule."""
        return self.config.rpartition("_")[0]


class Sum(NamedTuple):
    """The terms between our count and the published one, in parameters."""

    counted: int
    positions: int  # absolute positions for 1344 px, less the tables of the relative bias
    classifier: int  # the last norm and the head, of a classifier for 1000 classes
    background: int  # rows of the heads, below 0

    @property
    def total(self) -> int:
        return sum(self)


def read_rows() -> list[Row]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return [Row(**line) for line in csv.DictReader(file)]


@functools.cache
def adds_up(detector: str) -> Sum:
    """Return the terms of a detector's published count, which is the same for both schedules."""
    file = ROOT / "configs/coco" / f"{detector}_1x.yaml"
    cfg = get_config(file)
    arch = cfg.MODEL.VIT.MSVIT.ARCH
    absolute = get_config(file, [f"MODEL.VIT.MSVIT.ARCH={arch.replace('a0', 'a1')}"])
    with torch.device("meta"):
        model, other = vil.build_model(cfg), vil.build_model(absolute)
        classifier = MsViT(parse_arch(arch, "longformer"), num_classes=1000)
    return Sum(
        count(model),
        count(other) - count(model),
        count(classifier.norm) + count(classifier.head),
        -sum(background(layer, cfg.DATA.NUM_CLASSES) for layer in model.get_classifier()),
    )


def background(layer: nn.Module, categories: int) -> int:
    """Count the parameters that a predictor layer has only for the background. Box scores have
    them in detectron2 too, so they count as 0."""
    rows = layer.weight.shape[0]
    if rows == categories + 1 and isinstance(layer, nn.Linear):
        return 0
    return count(layer) // (categories + 1)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def section() -> str:
    """Return the section as Markdown."""
    header = ("config", "pre-trained", "box AP", "mask AP", "parameters")
    return f"## COCO detection\n\n{INTRODUCTION}\n{table(header, map(line, read_rows()))}"


def line(row: Row) -> tuple[str, ...]:
    link = f"[`{row.config}`](configs/coco/{row.config}.yaml)"
    parameters = f"{row.parameters}, {mega(adds_up(row.detector).counted)}"
    return link, row.pretraining, row.box_ap, row.mask_ap, parameters
