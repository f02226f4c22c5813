"""The table and the plots of a sweep's results."""

import csv
import io

import pytest

from vil.report import sweep_plots
from vil.report.sweep_table import RunRow, Table, markdown, runs_csv, summarize, summary_csv

ATTN = "MODEL.VIT.MSVIT.ATTN_TYPE"


def row(name, seed, metric, state="finished", **more):
    settings = {ATTN: name, "SEED": seed}
    return RunRow(f"{name}-{seed}", name, settings, seed, state, metric=metric, **more)


def table():
    full = [row("full", 0, 90.0, images_per_second=100.0), row("full", 1, 94.0, memory_mib=8.0)]
    full += [row("full", 2, None, "failed", reason="a|b\n<c>")]
    one = [row("one", 0, 50.0, images_per_second=10.0, memory_mib=4.0)]
    none = [row("none", 0, None, "pending")]
    groups = [summarize(runs[0].group, runs, 1000, 10**7) for runs in (full, one, none)]
    keys = {ATTN: "ATTN_TYPE", "SEED": "SEED"}
    return Table("s", "top1", "top-1", "%", keys, groups, [*full, *one, *none])


def test_the_mean_and_spread_are_those_of_the_finished_runs():
    full, one, none = table().groups
    assert (full.metric, full.seeds, full.runs) == (92.0, 2, 3)
    assert full.spread == pytest.approx(8**0.5)
    assert (full.images_per_second, full.memory_mib) == (100.0, 8.0)
    assert (one.metric, one.spread, one.seeds) == (50.0, None, 1)
    assert (none.metric, none.spread, none.seeds) == (None, None, 0)


def test_the_files_hold_the_same_numbers():
    rows = list(csv.DictReader(io.StringIO(summary_csv(table()))))
    assert [r["top1"] for r in rows] == ["92.0", "50.0", ""]
    assert [r[ATTN] for r in rows] == ["full", "one", "none"]
    assert "SEED" not in rows[0]
    runs = list(csv.DictReader(io.StringIO(runs_csv(table()))))
    assert [r["seed"] for r in runs] == ["0", "1", "2", "0", "0"]
    assert runs[2]["reason"] == "a|b\n<c>"
    text = markdown(table())
    assert "| full | 92.00 ± 2.83 | 2 of 3 | 100.0 | 8 | 1 k | 10 M |" in text
    assert "| full-2 | failed | 0 | a\\|b &lt;c> |" in text


def test_the_final_test_has_a_column_if_there_is_one():
    runs = [row("full", 0, 90.0, test=80.0), row("full", 1, 94.0, test=84.0)]
    group = summarize("full", runs, 1000, 10**7)
    tested = table()._replace(groups=[group, *table().groups[1:]], runs=runs)
    assert "| full | 92.00 ± 2.83 | 82.00 ± 2.83 | 2 | - | - |" in markdown(tested)
    assert "| one | 50.00 | - | 1 |" in markdown(tested)
    groups = list(csv.DictReader(io.StringIO(summary_csv(tested))))
    assert [group["test_top1"] for group in groups] == ["82.0", "", ""]
    rows = list(csv.DictReader(io.StringIO(runs_csv(tested))))
    assert [run["test_top1"] for run in rows] == ["80.0", "84.0"]


def test_plots_leave_out_what_has_no_result(tmp_path):
    files = sweep_plots.draw(table(), tmp_path / "plots")
    assert [file.name for file in files] == ["top1.png", "top1_cost.png"]
    assert all(file.stat().st_size > 5000 for file in files)
    empty = table()._replace(groups=table().groups[2:])
    assert sweep_plots.draw(empty, tmp_path / "none") == []
    bare = [group._replace(images_per_second=None, macs=None) for group in table().groups]
    (file,) = sweep_plots.draw(table()._replace(groups=bare), tmp_path / "bare")
    assert file.name == "top1.png"
