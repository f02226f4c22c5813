"""Parts of a run's page: charts, and records of folders in any state."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from vil.report.compare import ComparedMetric, ComparedRun, render_comparison
from vil.report.curves import plot_curves
from vil.report.page import Page, render
from vil.report.run_record import RunRecord, metrics
from vil.tasks.image import target
from vil.tasks.image.report import plot_predictions

pytestmark = pytest.mark.smoke


class Text(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.said = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.said += data


@pytest.mark.parametrize(
    "points",
    [
        [(0, 0.0)],
        [(1, 5.0), (2, 5.0)],
        [(0.5, -3e-9), (70, 1e9)],
        [(n, n % 7) for n in range(9999)],
    ],
    ids=["one", "level", "wide", "many"],
)
def test_curves_of_any_shape(points, tmp_path):
    logged = [
        {"split": split, "step": x, "epoch": x, key: y}
        for split in ("train", "val/<x>")
        for key in ("top1", "top5")
        for x, y in points
    ]
    page = Page("run", RunRecord(tmp_path, {}, [], [], logged), [], "none", 1.0, "now", "top1")
    drawn = render(page)
    drawn = drawn[drawn.index("<figure") : drawn.index("</figure>")]
    assert "nan" not in drawn
    assert len(drawn) < 40_000
    assert "accuracy (%) against epoch: train top1 from" in Text(drawn).said
    assert "<h3>accuracy</h3>" in drawn
    lines = [a["points"].split() for tag, a in Text(drawn).tags if tag == "polyline"]
    for place in (pair for line in lines[:4] for pair in line):
        x, y = map(float, place.split(","))
        assert 0 <= x <= 400
        assert 0 <= y <= 250


@pytest.mark.parametrize("size", [1e-9, 1.0, 1234567.0])
def test_the_metric_of_every_task_is_a_curve_with_a_named_axis(size, tmp_path):
    logged = [
        {"split": f"val/{name}", "step": x, "epoch": x, "depth_error": size * (1 + x / 1000)}
        for name in ("near", "a name of a test set that is longer than a line of the legend " * 3)
        for x in range(1, 4)
    ]
    record = RunRecord(tmp_path, {}, [], [], logged)
    options = dict(higher_is_better=False, label="error of depth", unit="mm")
    drawn = render(Page("run", record, [], "none", 3.0, "now", "depth_error", **options))
    assert "<h3>error of depth</h3>" in drawn
    assert ">error of depth (mm)</text>" in drawn
    assert ">epoch</text>" in drawn
    labels = re.findall(r'<text x="(.*?)" y=".*?" dy=".*?" text-anchor="end">(.*?)<', drawn)
    assert len({label for _, label in labels}) == len(labels) >= 2
    assert all(float(x) - 7 * len(label) > 0 for x, label in labels)  # not cut off on the left


def logged_run(folder, evaluations):
    logged = [
        {"split": split, "step": step, "epoch": step} | ({} if value is None else {"top1": value})
        for step, (split, value) in enumerate(evaluations, start=1)
    ]
    return RunRecord(folder, {}, [], [], logged)


def cards_of(record):
    text = render(Page("run", record, [], "none", 2.0, "now", "top1", label="top-1", unit="%"))
    return re.findall("<dt>(.*?)</dt><dd>(.*?)</dd><dd class=.*?>(.*?)</dd>", text)


def compared_cells(records):
    """The cells of the metric of each run in a comparison, with their mark of the best."""
    metric = ComparedMetric("top1", "top-1", "%")
    runs = [ComparedRun(f"run {n}", each, {}, "none", 2.0) for n, each in enumerate(records)]
    text = render_comparison(runs, metric, [metric], made="now")
    rows = re.findall(r"<tr>\n<th scope=\"row\">.*?</tr>", text, flags=re.DOTALL)[: len(runs)]
    return [re.findall("<td.*?>(.*?)</td>", row)[2:-4] for row in rows]


def test_the_last_evaluation_is_shown_even_if_it_is_nan(tmp_path):
    good, bad = (
        logged_run(tmp_path, [("val/a", value), ("val/a", last)])
        for value, last in ((60.0, 50.0), (90.0, None))  # NaN is not read from the log
    )
    assert cards_of(bad) == [
        ("Best top-1 in training", "90.00%", "epoch 1"),
        ("Last top-1 in training", "-", "epoch 2"),
    ]
    assert compared_cells([good, bad]) == [["60.00", "1", "★ 50.00"], ["★ 90.00", "1", "-"]]


def test_the_test_is_of_the_first_set(tmp_path):
    evaluations = [("val/a", 60.0), ("val/b", 70.0), ("test/c", 50.0), ("test/d", 10.0)]
    one, two = (logged_run(tmp_path, evaluations[:n]) for n in (3, 4))
    assert cards_of(one)[2][1:] == ("50.00%", "on images not used to select the checkpoint")
    assert cards_of(two)[1:] == [
        ("Last top-1 in training", "60.00%", "epoch 1, on a"),
        ("Test top-1", "50.00%", "on images of c not used to select the checkpoint"),
    ]
    assert [cells[3] for cells in compared_cells([two, two])] == ["★ 50.00"] * 2


def test_dollar_signs_in_names_are_no_formulas(tmp_path):
    """matplotlib refuses r$_a_b$ as a formula."""
    name = "US$_a_b in $"
    curves = {f"val/{name}": [(1, 2.0)], "train": [(1, 3.0)]}
    outputs = target.Outputs(np.arange(2), np.ones((2, 1)), np.ones((2, 1)))
    for figure in (plot_curves(curves, name), plot_predictions(outputs, [name])):
        figure.savefig(tmp_path / "plot.png")


def test_a_folder_in_any_state(tmp_path):
    """Lines cut short, of other shapes, or with numbers that are none; files that are not there."""
    empty = RunRecord.read(tmp_path)
    assert (empty.status, empty.commands, empty.points) == ({}, [], [])
    good = {"step": 4, "epoch": 1.0, "split": "train", "time": 0.5, "loss": 1.0}
    odd = [
        "[]", "7", "null", '{"step": 1}', '{"step": 1, "epoch": "x", "split": "train"}',
        '{"step": 1e99, "epoch": 1, "split": "train"}',
        '{"step": 1, "epoch": 1, "split": ["train"]}', "[" * 5000, '{"step": 5, "epoc',
    ]  # fmt: skip
    lines = [json.dumps(good), *odd, json.dumps(good | {"step": 6, "loss": None})]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff")
    (tmp_path / "status.json").write_text("[1]")
    (tmp_path / "command.txt").write_text("# 2026-01-01T00:00:00+00:00\nvil a\n# no\nb\n"
                                          "# 2026-01-02T00:00:00+00:00\nvil c\n")  # fmt: skip
    record = RunRecord.read(tmp_path)
    assert record.status == {}
    assert [what for _, what in record.commands] == ["vil a\n# no\nb", "vil c"]
    assert [point["step"] for point in metrics(tmp_path / "metrics.jsonl")] == [4, 6]
    assert "loss" not in record.points[1]
    assert record.training_seconds() == 3.0
