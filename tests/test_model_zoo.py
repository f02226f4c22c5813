"""MODEL_ZOO.md is up to date, complete, and its counts agree with what was published."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from vil.config import get_config
from vil.pretrained.catalog import read_rows
from vil.tasks.image.build import INTERPOLATIONS

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs"))  # scripts of their own, not part of the package
zoo, counts = map(importlib.import_module, ("model_zoo", "zoo_counts"))

ROWS = read_rows()
PUBLISHED = [row for row in ROWS if row.parameters]
# Counts of parameters that do not round to the published figure.
OTHER_PARAMETERS = {
    "vil_small_rpb": "published without bias tables",
    "vil_medium_deep_rpb": "published without bias tables",
    "vil_medium_deep_384_rpb": "published without bias tables",
    "vil_base_deep_384_rpb": "published without bias tables",
    "performer": "published with buffers",
    "performer_partial": "published with buffers",
    "global_partial": "the published command makes another model",
}
OTHER_MACS = {
    "vil_medium_wide_384": "published for windows of 7",
    "vil_base_deep_384": "published for windows of 7",
    "vil_base_wide_384": "published for windows of 7",
    "performer": "published with two products more",
    "performer_partial": "published with two products more",
    "global": "unknown",
    "global_partial": "the published command makes another model",
}
# Counted in the reference itself.
EXACT = {
    "vil_tiny": 6_707_080, "vil_tiny_rpb": 6_719_698,
    "vil_small": 24_635_752, "vil_small_rpb": 24_657_328,
    "vil_medium_deep": 39_721_192, "vil_medium_deep_rpb": 39_782_296,
    "vil_medium_wide": 39_776_488, "vil_medium_wide_384": 39_800_808,
    "vil_medium_deep_384": 39_736_552, "vil_medium_deep_384_rpb": 39_928_696,
    "vil_base_deep_384": 55_711_720, "vil_base_deep_384_rpb": 56_018_824,
    "vil_base_wide_384": 79_026_920,
    "vil_swin_tiny_rpb": 28_338_352, "vil_swin_small_rpb": 49_737_328,
    "full": 24_635_752, "longformer": 24_635_752,
    "linformer": 26_256_744, "linformer_partial": 25_840_744,
    "srformer64": 52_947_304, "srformer32": 31_123_816, "srformer32_partial": 26_405_224,
    "performer": 24_635_752, "performer_partial": 24_635_752,
    "global": 24_855_592, "global_partial": 18_490_792,
}  # fmt: skip


def name(row) -> str:
    return Path(row.config).stem


@pytest.mark.long
def test_the_page_is_what_the_generator_makes():
    assert (ROOT / "MODEL_ZOO.md").read_text(encoding="utf-8") == zoo.page()


def test_every_config_is_a_row_and_every_row_a_config():
    files = (ROOT / "configs/imagenet").rglob("*.yaml")
    assert {row.config for row in ROWS} == {
        path.relative_to(ROOT / "configs").as_posix() for path in files
    }


@pytest.mark.long
def test_the_parameters_are_those_of_the_reference():
    assert {name(row): counts.count(row.config).parameters for row in PUBLISHED} == EXACT


def test_parameters_round_to_the_published_ones():
    different = set()
    for row in PUBLISHED:
        digits = len(row.parameters.partition(".")[2])
        if f"{counts.count(row.config).parameters / 1e6:.{digits}f}" != row.parameters:
            different.add(name(row))
    assert different == OTHER_PARAMETERS.keys()


def test_macs_are_within_half_a_percent_of_the_published_ones():
    off = {name(r): counts.count(r.config).macs / (float(r.macs) * 1e9) - 1 for r in PUBLISHED}
    assert {model for model, share in off.items() if abs(share) >= 0.005} == OTHER_MACS.keys()


@pytest.mark.parametrize("row", PUBLISHED, ids=name)
def test_the_config_says_what_the_table_says(row):
    """Its head quotes top-1, and the weights' folders whose names explain a setting."""
    head = (ROOT / "configs" / row.config).read_text(encoding="utf-8").split("_BASE_:")[0]
    assert re.findall(r"Published: ([\d.]+) top-1", head) == [row.top1]
    known = {part for other in ROWS for part in (other.folder, other.folder.split("/")[1])}
    quoted = {word for word in re.findall(r"[\w/-]+", head) if re.search("IN22k|_lr|_mode", word)}
    assert quoted <= known


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section} {Path(row.config).stem}")
def test_what_stands_beside_the_weights_is_what_the_config_says(row):
    cfg, counted = get_config(ROOT / "configs" / row.config), counts.count(row.config)
    assert (int(row.size), float(row.crop_pct)) == (cfg.INPUT.IMAGE_SIZE, cfg.INPUT.CROP_PCT)
    assert row.interpolation == INTERPOLATIONS[cfg.INPUT.INTERPOLATION]
    assert row.windows == "/".join(str(spec.attn_size) for spec in counted.model.specs)
    assert int(row.counted_parameters) == counted.parameters
    assert int(row.counted_macs) == counted.macs
    assert bool(row.weights) == (row.section != "attention")
