"""The detectors' part of the zoo: what was published on COCO, and how the parameters add up."""

import csv
import functools
from collections.abc import Iterator
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
FOLDERS = {"ViL-Tiny": "viltiny", "ViL-Small": "vilsmall", "ViL-Medium-Deep": "vilmedium",
           "ViL-Base-Deep": "vilbase"}  # fmt: skip
INTRODUCTION = """\
Torchvision's detectors on ViL with relative bias and local attention in all stages, as
`vil detect train --config-file coco/CONFIG.yaml --data DIR MODEL.MODEL_PATH WEIGHTS` trains them.
The figures are of val2017, published: nobody measured them here. `folder` is where the weights of
the 2021 reference lay, `msvit_det/visionlongformer/<folder>/model_final.pth`; their backbone is
read, their heads are detectron2's and are not.
"""
SUM = """\
### How their parameters add up

The published counts are those of the models with the absolute position, made for 1344 px, and
include the last norm and the head for 1000 classes, which the reference built into a detector and
never used. Torchvision's heads have a row for the background where detectron2's have none.
"""


class Row(NamedTuple):
    """A line of the table as published; parameters in millions, with an M."""

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
        """The config's name without its schedule."""
        return self.config.rpartition("_")[0]

    @property
    def folder(self) -> str:
        """Where the reference's weights lay."""
        return f"{FOLDERS[self.backbone]}/{self.method.replace(' ', '').replace('-', '').lower()}"


class Sum(NamedTuple):
    """From our count to the published one, in parameters."""

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
    """The parts of the published count of a detector, the same with both schedules."""
    file = ROOT / "configs/coco" / f"{detector}_1x.yaml"
    cfg = get_config(file)
    arch = cfg.MODEL.VIT.MSVIT.ARCH
    absolute = get_config(file, [f"MODEL.VIT.MSVIT.ARCH={arch.replace('a0', 'a1')}"])
    with torch.device("meta"):
        model, other = vil.build_model(cfg), vil.build_model(absolute)
        whole = MsViT(parse_arch(arch, "longformer"), num_classes=1000)
    return Sum(
        count(model),
        count(other) - count(model),
        count(whole.norm) + count(whole.head),
        -sum(background(layer, cfg.DATA.NUM_CLASSES) for layer in model.get_classifier()),
    )


def background(layer: nn.Module, categories: int) -> int:
    """The parameters of a predictor's layer that are there for the background alone; the scores of
    boxes have them in detectron2 too."""
    rows = layer.weight.shape[0]
    if rows == categories + 1 and isinstance(layer, nn.Linear):
        return 0
    return count(layer) // (categories + 1)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def section() -> str:
    """The text of the page."""
    return "\n".join([f"## COCO detection\n\n{INTRODUCTION}", results(), SUM, sums()])


def results() -> str:
    header = (
        "backbone", "config", "schedule", "pre-trained", "box AP published", "mask AP published",
        "parameters published", "counted", "folder",
    )  # fmt: skip
    return table(header, (line(row) for row in read_rows()))


def line(row: Row) -> tuple[str, ...]:
    folder = f"`{row.folder}{row.schedule}`"
    link = f"[`{row.config}.yaml`](configs/coco/{row.config}.yaml)"
    counted = mega(adds_up(row.detector).counted)
    return (
        row.backbone, link, row.schedule, row.pretraining, row.box_ap, row.mask_ap, row.parameters,
        counted, folder,
    )  # fmt: skip


def sums() -> str:
    header = (
        "detector", "counted", "positions", "norm and head", "background", "sum", "published",
    )  # fmt: skip
    return table(header, lines_of_sums())


def lines_of_sums() -> Iterator[tuple[str, ...]]:
    for row in read_rows():
        if row.schedule == "1x":
            parts = adds_up(row.detector)
            yield (
                f"`{row.detector}`",
                *(f"{part:,}" for part in parts),
                f"{parts.total:,}",
                row.parameters,
            )
