"""docs/attention.md: its examples run, it has every backend, its numbers are those measured."""

import json
import re
from pathlib import Path

import pytest

from tests.common.backends import restored_backends
from vil.ops import BACKENDS
from vil.ops.backends import BACKWARDS, FORWARDS
from vil.ops.backends.triton import fused
from vil.ops.dispatch import CHOICES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
RESULT = json.loads((ROOT / "benchmarks/results/attention-engine-cpu.json").read_text())
TEXT = " ".join(PAGE.split())
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def own_tables():
    with restored_backends():
        yield
    CHOICES.clear()


@pytest.mark.parametrize(
    "example",
    [pytest.param(e, marks=pytest.mark.long if "autotune" in e else ()) for e in EXAMPLES],
    ids=range(len(EXAMPLES)),
)
def test_its_examples_run(example, own_tables):
    exec(example, {})


def test_it_has_a_paragraph_for_every_backend():
    single = set(BACKENDS) - {name for name in BACKENDS if "+" in name}
    assert single >= {*FORWARDS, *BACKWARDS}
    for name in single:
        assert re.search(rf"\*\*[^*]*\b{name}\b[^*]*\*\*", PAGE), name


def test_its_limits_are_those_of_the_code():
    low, high = fused.HEAD_DIMS
    assert f"Head dims {low} to {high}, w {' to '.join(map(str, fused.WINDOWS))}" in TEXT


def test_its_numbers_are_those_of_the_result():
    """The table has every ratio of the committed result, rounded."""
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| (.*?) \|$", PAGE, flags=re.MULTILINE)
    table = {what: (value, wanted) for what, value, wanted in rows}
    for ratio in RESULT["ratios"]:
        what = ratio["name"].partition(" ")[2]  # without the part's letter
        assert table[what] == (f"{ratio['value']:.3g}", ratio["wanted"])
