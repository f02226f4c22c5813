"""Render the report of a run as one self-contained HTML page.

The page shows metrics, curves, model, config, command and machine. This file prepares the data for
the template page.html.j2.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from vil.report.charts import make_chart
from vil.report.curves import group_curves, plot_of
from vil.report.html import Html, render_template
from vil.report.run_record import RunRecord
from vil.utils.metric_format import digits_for

MAX_EVALUATIONS, MAX_SETS = 100, 12
NOT_METRICS = ("step", "epoch", "split", "wall", "count")
Card = tuple[str, str, str]  # title, value, remark
Table = tuple[str, list[str], list[list[str]]]  # caption, names of columns, rows


class ModelCost(NamedTuple):
    """Cost of a model: number of parameters, and multiply-accumulates (MACs) for one image. stages:
    a row (name, attention, tokens, width, parameters, MACs) per stage."""

    parameters: int
    macs: int
    stages: list[tuple]


class Setting(NamedTuple):
    """Config key with its value as text. default: the default value as text, or None if `value` is
    the default."""

    key: str
    value: str
    default: str | None = None


class Page(NamedTuple):
    """Content of the report of a run.

    record: the logged data.
    model: cost of the model, or the reason why the cost is unknown.
    epochs: configured number of epochs.
    made: when the page was made, and by which version of vil.
    metric, label, unit: key, label and unit of the metric that selects the best checkpoint.
    columns: metrics to show in the table of evaluations; empty for all.
    cards: numbers to show at the top, from an evaluation that was run for this page.
    sections: other results of this evaluation.
    """

    title: str
    record: RunRecord
    settings: list[Setting]
    model: ModelCost | str
    epochs: float
    made: str
    metric: str
    higher_is_better: bool = True
    label: str = ""
    unit: str = ""
    columns: Sequence[str] = ()
    cards: Sequence[Card] = ()
    sections: Sequence[Html] = ()


def render(page: Page) -> str:
    """Render the report of a run as the text of one HTML file."""
    evaluations = list(page.record.evaluations().items())[:MAX_SETS]
    metric = plot_of(page.metric, page.label, page.unit)
    cards = [*page.cards, *_logged_cards(page), *_progress_cards(page)]
    if isinstance(model := page.model, ModelCost):
        cards.append(("Parameters", f"{model.parameters:,}", ""))
        cards.append(("Multiply-accumulates", short(model.macs), "for one image"))
    return render_template(
        "report/page.html.j2",
        page=page,
        made=page.made,
        status=page.record.status,
        cards=cards,
        charts=[
            make_chart(curves, plot.title, plot.label)
            for _, plot, curves in group_curves(page.record.points, metric)
        ],
        evaluations=[(test, *_evaluation_table(test, p, page.columns)) for test, p in evaluations],
        changed=[setting for setting in page.settings if setting.default is not None],
    )


def _logged_cards(page: Page) -> list[Card]:
    """Return the cards with values of the page's metric, as (title, value, remark).

    A card is a number at the top of the page. Two cards show the best and the last value in
    training, on the first evaluated set. If a final test is logged, a third card shows its value
    on the first test set. The remarks name the set if there are several. Returns [] if no value in
    training is logged.
    """
    key, label, form = page.metric, page.label or page.metric, digits_for(page.unit)
    sets, tests = page.record.evaluations(), page.record.evaluations("test")
    points = next(iter(sets.values()), [])
    known = [p for p in points if key in p]
    if not known:
        return []
    best = (max if page.higher_is_better else min)(known, key=lambda p: p[key])
    on_set = f", on {next(iter(sets))}" if len(sets) > 1 else ""
    logged = [
        (f"{which} {label} in training", p, f"epoch {p['epoch']:g}{on_set}")
        for which, p in (("Best", best), ("Last", points[-1]))
    ]
    for name, (*_, last) in list(tests.items())[:1]:
        of_set = f" of {name}" if len(tests) > 1 else ""
        remark = f"on images{of_set} not used to select the checkpoint"
        logged.append((f"Test {label}", last, remark))
    return [
        (title, f"{p[key]:{form}}{page.unit}" if key in p else "-", remark)
        for title, p, remark in logged
    ]


def _progress_cards(page: Page) -> list[Card]:
    """Return the cards about training, as (title, value, remark).

    A card is a number at the top of the page: here, the number of trained epochs, the time of all
    training steps and, if logged, the speed. Returns [] if no step is logged.
    """
    steps = [p for p in page.record.points if p["split"] == "train"]
    if not steps:
        return []
    last = steps[-1]
    cards = [
        ("Epochs", f"{last['epoch']:g}", f"of {page.epochs:g}, step {last['step']:,.0f}"),
        (
            "Time of all steps",
            format_duration(page.record.training_seconds()),
            "without evaluation",
        ),
    ]
    if "img/s" in last:
        cards.append(("Images per second", f"{last['img/s']:,.0f}", "at the end"))
    return cards


def format_duration(seconds: float) -> str:
    """Format a time in seconds, such as "1 day, 2:00:00". Returns "unknown" if the time is
    NaN or is too long for a timedelta."""
    try:
        return str(timedelta(seconds=round(seconds)))
    except (OverflowError, ValueError):  # ValueError: NaN
        return "unknown"


def _evaluation_table(test_set: str, points: list[dict], columns: Sequence[str]) -> Table:
    """Return a table (caption, column names, rows of text) of the evaluations on a test set.

    points: logged evaluations, of which the table shows the last MAX_EVALUATIONS. columns: metrics
    to show; empty for all.
    """
    logged = list(dict.fromkeys(key for point in points for key in point))
    keys = [key for key in columns or logged if key in logged and key not in NOT_METRICS]
    rows = [
        [f"{p['epoch']:g}", *(f"{p[key]:.4f}" if key in p else "-" for key in keys)]
        for p in points[-MAX_EVALUATIONS:]
    ]
    more = f", the last {len(rows)} of {len(points)}" if len(points) > len(rows) else ""
    return f"Evaluations on {test_set}{more}", ["epoch", *keys], rows


def short(count: float) -> str:
    """Format a large number with three digits and a suffix, such as 18,200,000 as "18.2 M"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:g}"
