"""Plots of a sweep's results."""

from vil.report.sweep_plots import plot_cost
from vil.report.sweep_table import GroupRow, Table


def test_the_legend_names_every_group():
    """Also a group of which one of the costs is unknown."""
    common = dict(spread=None, values=[], tests=[], seeds=1, runs=1, memory_mib=None)
    groups = [
        GroupRow("a", {}, 90.0, images_per_second=None, macs=10**7, **common),
        GroupRow("b", {}, 80.0, images_per_second=9.0, macs=10**6, **common),
        GroupRow("c", {}, 70.0, images_per_second=8.0, macs=None, **common),
    ]
    (legend,) = plot_cost(Table("s", "top1", "top-1", "%", {}, groups, [])).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]
