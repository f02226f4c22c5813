"""benchmarks/encoder.py measures every block, and checks that equal ones are equal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vil.layers.attention import ATTENTIONS

SCRIPT = Path(__file__).parents[2] / "benchmarks/encoder.py"


def run(*words):
    return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)


@pytest.mark.long
def test_a_short_run_writes_a_table_and_a_plot(tmp_path):
    done = run("--widths", "64", "--grids", "3", "7", "--rounds", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "encoder.json").read_text())
    names = [*ATTENTIONS, "torch", "torch fast", "timm"]
    assert [row["block"] for row in result["rows"]] == 2 * names
    for row in result["rows"]:
        assert row["forward_ms"] > 0
        assert (row["training_ms"] is None) == (row["block"] == "torch fast")
    same = [r for r in result["rows"] if r["grid"] == 7 and r["block"] in ("full", "torch", "timm")]
    assert len({(row["parameters"], row["macs"]) for row in same}) == 1
    assert len((tmp_path / "encoder.md").read_text().splitlines()) == 4 + 2 * len(names)
    assert (tmp_path / "encoder.png").stat().st_size > 10_000
    assert result["machine"]["name"] in done.stdout or result["machine"]["title"] in done.stdout


@pytest.mark.long
def test_impossible_sizes_are_refused_in_a_line(tmp_path):
    for words, reason in (
        (["--widths", "96"], "--widths must be multiples of 64, got 96"),
        (["--attentions", "ful"], "--attentions must be among"),
    ):
        done = run(*words, "--out", str(tmp_path))
        assert done.returncode == 1
        assert done.stderr.startswith(reason)
