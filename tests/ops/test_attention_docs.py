"""docs/internals: backends.md has every backend, attention_speed.md the numbers measured."""

import json
import re
from pathlib import Path

from vil.ops import BACKENDS
from vil.ops.backends.triton import fused

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/internals/backends.md").read_text(encoding="utf-8")
SPEED = (ROOT / "docs/internals/attention_speed.md").read_text(encoding="utf-8")
RESULT = json.loads((ROOT / "benchmarks/results/attention-engine-cpu.json").read_text())
TEXT = " ".join(PAGE.split())


def test_it_has_a_paragraph_for_every_backend():
    for name in BACKENDS:
        assert re.search(rf"\*\*[^*]*\b{name}\b[^*]*\*\*", PAGE), name


def test_its_limits_are_those_of_the_code():
    low, high = fused.HEAD_DIMS
    assert f"Head dims {low} to {high}, w {' to '.join(map(str, fused.WINDOWS))}" in TEXT


def test_its_numbers_are_those_of_the_result():
    """The table has every ratio of the committed result, rounded."""
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| (.*?) \|$", SPEED, flags=re.MULTILINE)
    table = {what: (value, wanted) for what, value, wanted in rows}
    for ratio in RESULT["ratios"]:
        what = ratio["name"].partition(" ")[2]  # without the part's letter
        assert table[what] == (f"{ratio['value']:.3g}", ratio["wanted"])
