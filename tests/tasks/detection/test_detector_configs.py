"""Shipped configs of detectors: their heads are true, their parameters those published."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import vil
from tests.common.built import task_of
from tests.common.marks import cases
from vil.config import get_config
from vil.tasks.detection.models.detectors import DetectorConfig

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "docs"))  # scripts, not part of the package
zoo = importlib.import_module("zoo_detectors")
NAMES = ("coco/*", "scenes/*", "own/*rcnn*")
FILES = sorted(path for name in NAMES for path in (ROOT / "configs").glob(name))
PUBLISHED = {row.config: row for row in zoo.read_rows()}
# Millions of parameters, counted in the reference: absolute position for 1344 px, with a head.
DETECTORS = {
    "mask_rcnn_vil_tiny": 26.850, "mask_rcnn_vil_small": 45.017,
    "mask_rcnn_vil_medium_deep": 60.103, "mask_rcnn_vil_base_deep": 76.078,
    "retinanet_vil_tiny": 16.642, "retinanet_vil_small": 35.681,
    "retinanet_vil_medium_deep": 50.767, "retinanet_vil_base_deep": 66.742,
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_head_of_a_config_is_true(path):
    """It names a command with this file, the published metrics, and counts parameters."""
    lines, cfg = path.read_text().splitlines(keepends=True), get_config(path)
    head = "".join(line for line in lines if line.startswith("#"))
    assert str(path.relative_to(ROOT / "configs")) in head
    if cfg.DATA.NUM_CLASSES == "auto":
        cfg = get_config(path, ["DATA.NUM_CLASSES=2"])
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in vil.build_model(cfg).parameters())
    assert f"{count / 1e6:.2f}" == re.search(r"([\d.]+)M parameters", head)[1]
    if path.parent.name == "coco":
        row = PUBLISHED[path.stem]
        metrics = f"{row.box_ap} box AP" + f", {row.mask_ap} mask AP" * bool(row.mask_ap)
        assert f"Published: {metrics} on val2017" in head
        assert float(row.drop_path) == cfg.MODEL.VIT.DROP_PATH
        assert ("3x" if cfg.OPTIM.EPOCHS == 36 else "1x") == row.schedule


def test_the_defaults_of_a_detector_are_those_of_the_config():
    cfg = get_config(None, ["TASK=detection", "DETECTION.MODEL=mask_rcnn"])
    given, defaults = task_of(cfg).config, DetectorConfig(cfg.DATA.NUM_CLASSES)
    for name, value in vars(defaults).items():
        expected = list(value) if isinstance(value, tuple) else value
        assert getattr(given, name) == expected, name


def test_every_published_detector_has_its_config():
    assert PUBLISHED.keys() == {path.stem for path in FILES if path.parent.name == "coco"}


@pytest.mark.parametrize(
    "row", cases(zoo.read_rows(), long=zoo.read_rows()[1:-1]), ids=lambda row: row.config
)
def test_the_parameters_of_detectors_add_up_to_the_published_ones(row):
    """And, to the thousand, to those counted in the reference itself."""
    found = zoo.adds_up(row.detector).total
    digits = len(row.parameters.rstrip("M").partition(".")[2])
    assert f"{found / 1e6:.{digits}f}M" == row.parameters
    assert round(found / 1e6, 3) == DETECTORS[row.config.rpartition("_")[0]]
