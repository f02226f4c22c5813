"""Render the report of a run as one self-contained HTML page.

The page shows metrics, curves, model, config, command and machine. This file prepares the data, and
page.html.j2 is the template.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from vil.report.charts import make_chart
from vil.report.curves import group_curves
from vil.report.html import Html, render_template
from vil.report.run_record import RunRecord

MAX_EVALUATIONS, MAX_SETS = 100, 12
NOT_METRICS = ("step", "epoch", "split", "wall", "count")
Card = tuple[str, str, str]  # title, value, remark
Table = tuple[str, list[str], list[list[str]]]  # caption, names of columns, rows


class ModelCost(NamedTuple):
    """Total cost of a model, and a row (name, attention, tokens, width, parameters, MACs) per
    stage."""

    parameters: int
    macs: int
    stages: list[tuple]


class Setting(NamedTuple):
    """A config key with its value. default: the default value if it differs, else None."""

    key: str
    value: str
    default: str | None = None


class Page(NamedTuple):
    """The data of a report.

    model: the cost of the model, or the reason why it is unknown. cards, sections: content that the
    task made from an evaluation. metric, label, unit: key, label and unit of the metric that
    selects the best checkpoint. columns: metrics in the table of evaluations; empty for all.
    epochs: the configured number of epochs. made: a line about how the page was made.
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
    """Render a page as HTML."""
    evaluations = list(page.record.evaluations().items())[:MAX_SETS]
    cards = [*page.cards, *_logged_cards(page), *_progress_cards(page)]
    if isinstance(model := page.model, ModelCost):
        cards.append(("Parameters", f"{model.parameters:,}", ""))
        cards.append(("Multiply-accumulates", short(model.macs), "for one image"))
    return render_template(
        "report/page.html.j2",
        page=page,
        status=page.record.status,
        cards=cards,
        charts=[make_chart(curves, *plot) for *plot, curves in group_curves(page.record.points)],
        evaluations=[(test, *_evaluation_table(test, p, page.columns)) for test, p in evaluations],
        changed=[setting for setting in page.settings if setting.default is not None],
    )


def _logged_cards(page: Page) -> list[Card]:
    """Return cards with the best and the last evaluation on the first test set, from the log."""
    key, label = page.metric, page.label or page.metric
    points = [p for p in next(iter(page.record.evaluations().values()), []) if key in p]
    if not points:
        return []
    best = (max if page.higher_is_better else min)(points, key=lambda p: p[key])
    return [
        (f"{which} {label} in training", f"{p[key]:.2f}{page.unit}", f"epoch {p['epoch']:g}")
        for which, p in (("Best", best), ("Last", points[-1]))
    ]


def _progress_cards(page: Page) -> list[Card]:
    """Return cards with the number of trained epochs and the training time."""
    steps = [p for p in page.record.points if p["split"] == "train"]
    if not steps:
        return []
    last = steps[-1]
    seconds = timedelta(seconds=round(page.record.training_seconds()))
    cards = [
        ("Epochs", f"{last['epoch']:g}", f"of {page.epochs:g}, step {last['step']:,.0f}"),
        ("Time of all steps", str(seconds), "without evaluation"),
    ]
    if "img/s" in last:
        cards.append(("Images per second", f"{last['img/s']:,.0f}", "at the end"))
    return cards


def _evaluation_table(test_set: str, points: list[dict], columns: Sequence[str]) -> Table:
    """Return the table of all evaluations on a test set: caption, column names and rows."""
    logged = list(dict.fromkeys(key for point in points for key in point))
    keys = [key for key in columns or logged if key in logged and key not in NOT_METRICS]
    rows = [
        [f"{p['epoch']:g}", *(f"{p[key]:.4f}" if key in p else "-" for key in keys)]
        for p in points[-MAX_EVALUATIONS:]
    ]
    more = f", the last {len(rows)} of {len(points)}" if len(points) > len(rows) else ""
    return f"Evaluations on {test_set}{more}", ["epoch", *keys], rows


def short(count: float) -> str:
    """Format a large number with a suffix: 18,200,000 as "18.2 M"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:g}"
