"""Every shipped config loads, builds, and tells the truth in its head."""

import re
from pathlib import Path

import pytest
import torch

from vil import build
from vil.config import get_config
from vil.models.zoo import ARCHS

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
EXPERIMENTS = [path for path in FILES if "_base_" not in path.parts]


def model_of(path: Path) -> torch.nn.Module:
    with torch.device("meta"):
        return build.build_model(get_config(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_loads_and_builds(path):
    model, cfg = model_of(path), get_config(path)
    assert build.build_optimizer(cfg, model).param_groups
    assert build.build_schedule(cfg, steps_per_epoch=10).lr_at(0) > 0


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_its_head_is_true(path):
    """The head names a command with this file, and counts parameters and multiply-accumulates."""
    head = "".join(
        line for line in path.read_text().splitlines(keepends=True) if line.startswith("#")
    )
    assert str(path.relative_to(ROOT / "configs")) in head
    counted = re.search(r"([\d.]+)([MK]) parameters, ([\d.]+)([GM]) MACs", head)
    assert counted, "the head must say '...M parameters, ...G MACs'"
    units = {"K": 1e3, "M": 1e6, "G": 1e9}
    model, side = model_of(path), get_config(path).INPUT.IMAGE_SIZE
    for figure, unit, found in (
        (counted[1], counted[2], sum(p.numel() for p in model.parameters())),
        (counted[3], counted[4], sum(model.macs((side, side)))),
    ):
        digits = len(figure.partition(".")[2])
        assert f"{found / units[unit]:.{digits}f}" == figure


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/imagenet").glob("*.yaml")), ids=lambda path: path.stem
)
def test_it_has_the_architecture_of_its_name(path):
    assert ARCHS[path.stem] == get_config(path).MODEL.VIT.MSVIT.ARCH


def test_the_digits_model_exercises_what_it_should():
    """At least three stages, two of them longformer, 4x4 chunks, a ragged grid, a global token,
    under 450,000.
    """
    model = model_of(ROOT / "configs/digits/vil_nano.yaml")
    cfg = get_config(ROOT / "configs/digits/vil_nano.yaml")
    assert cfg.INPUT.IMAGE_SIZE >= 64
    assert len(model.stages) >= 3
    assert sum(p.numel() for p in model.parameters()) < 450_000
    side, windows = cfg.INPUT.IMAGE_SIZE, []
    for stage, spec in zip(model.stages, model.specs):
        side //= spec.patch
        windows += (
            [stage.blocks[0].attn.window((side, side))] if "longformer" in spec.attention else []
        )
    assert len(windows) >= 2
    assert min(windows[0].chunks) >= 4
    assert any(window.grid[0] % window.size for window in windows)
    assert {spec.num_global for spec in model.specs[:2]} == {1}
