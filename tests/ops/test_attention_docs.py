"""docs/guides/backends.md has every backend, and the limits of the code."""

import re
from pathlib import Path

from vil.ops import BACKENDS
from vil.ops.backends.triton import fused

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/backends.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def test_it_has_a_paragraph_for_every_backend():
    for name in BACKENDS:
        assert re.search(rf"\*\*[^*]*\b{name}\b[^*]*\*\*", PAGE), name


def test_its_limits_are_those_of_the_code():
    low, high = fused.HEAD_DIMS
    assert f"Head dims {low} to {high}, w {' to '.join(map(str, fused.WINDOWS))}" in TEXT
