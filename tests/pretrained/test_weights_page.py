"""The numbers of resizing in docs/guides/weights.md are those of the benchmark's result."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/weights.md").read_text(encoding="utf-8")
ROWS = json.loads((ROOT / "benchmarks/results/resizing-cpu.json").read_text())["rows"]
POSITIONS = ("relative bias", "absolute position")


def test_table_matches_the_result():
    """The table has a row per size, window and rule, with the result's values."""
    found = {(r["size"], r["window"], r["rule"], r["position"]): r for r in ROWS}
    for size, window, rule in {key[:3] for key in found}:
        line = f"| {size} px, {window} | `{rule}` |"
        for position in POSITIONS:
            row = found.get((size, window, rule, position))
            for name in ("as resized", "fine-tuned"):
                line += f" {row[name]:.2f} |" if row else "  |"
        assert line in PAGE, line
    for position in POSITIONS:
        (before,) = {row["before"] for row in ROWS if row["position"] == position}
        assert f"{before:.2f} with the {position}" in " ".join(PAGE.split())


def test_the_recommended_rule_keeps_accuracy_within_a_point():
    """`extend` for another window on images of the same size, else `linear`."""
    for row in ROWS:
        extends = row["position"] == "relative bias" and row["size"] == 224 and row["window"] != 7
        if row["rule"] == ("extend" if extends else "linear"):
            assert row["fine-tuned"] >= row["before"] - 1, row
