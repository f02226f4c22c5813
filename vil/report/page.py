"""A run as one HTML page: figures, curves, answers, model, config, command, machine.

Everything is inside the file: no script, no font, no picture from elsewhere.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from vil.report.charts import chart
from vil.report.curves import PICTURES, series_of
from vil.report.html import Html, document, element, name, number, scrolled, table
from vil.report.page_style import STYLE
from vil.report.run_record import RunRecord

MOST_EVALUATIONS, MOST_SETS, MOST_STARTS = 100, 12, 20
LONGEST_VALUE = 2000  # signs of a value of the config
NOT_METRICS = ("step", "epoch", "split", "wall", "count")
STATES = ("running", "finished", "failed", "hung", "preempted", "interrupted")


class ModelCost(NamedTuple):
    """parameters, macs: of all. stages: a row (name, attention, tokens, width, parameters, MACs)
    each."""

    parameters: int
    macs: int
    stages: list[tuple]


class Setting(NamedTuple):
    """A key of the config, its value, and the default where that is another one."""

    key: str
    value: str
    default: str | None = None


class Page(NamedTuple):
    """What a page is made from.

    model: its cost, or why it is unknown. cards, sections: the task's own, from an evaluation.
    metric, label, unit: of what decides which checkpoint is best. columns: the metrics in the table
    of evaluations, none: all. epochs: as requested. made: a line on what made the page, and when.
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
    cards: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[Html] = ()


def render(page: Page) -> str:
    """The page's HTML."""
    record = page.record
    parts = [cards(page), curves(record, page.columns), *page.sections]
    parts += [model(page.model), config(page.settings), starts(record)]
    title = f"{page.title[:100]}: report"
    return document(
        title, STYLE, header(page), element("main", *parts), element("footer", page.made)
    )


def header(page: Page) -> Html:
    """The run's name, and how it stands."""
    status = page.record.status
    state = str(status.get("state", "unknown"))[:40]
    words = [element("span", state, class_=f"badge {state if state in STATES else ''}".strip())]
    if status.get("code") is not None:
        words.append(f" exit code {str(status['code'])[:10]}")
    if status.get("time"):
        words.append(f" since {str(status['time'])[:40]}")
    parts = [element("h1", name(page.title)), element("p", *words)]
    if status.get("reason"):
        parts.append(element("p", str(status["reason"])[:2000], class_="reason"))
    return element("header", *parts)


def cards(page: Page) -> Html:
    """The figures to see first: (what, figure, remark)."""
    found = [*page.cards, *logged(page)]
    found += progress(page)
    if isinstance(page.model, ModelCost):
        found.append(("Parameters", f"{page.model.parameters:,}", ""))
        found.append(("Multiply-accumulates", short(page.model.macs), "of one image"))
    boxes = [
        element(
            "div", element("dt", what), element("dd", figure), element("dd", more, class_="more")
        )
        for what, figure, more in found
    ]
    return element("section", element("dl", *boxes, class_="cards"), aria_label="Summary")


def logged(page: Page) -> list[tuple[str, str, str]]:
    """The best and the last evaluation of the first test set, as training logged them."""
    points = next(iter(page.record.evaluations().values()), [])
    name, label = page.metric, page.label or page.metric
    points = [point for point in points if name in point]
    if not points:
        return []
    best = (max if page.higher_is_better else min)(points, key=lambda p: p[name])
    shown = (("Best", best), ("Last", points[-1]))
    return [
        (f"{which} {label} in training", f"{p[name]:.2f}{page.unit}", f"epoch {p['epoch']:g}")
        for which, p in shown
    ]


def progress(page: Page) -> list[tuple[str, str, str]]:
    """How far it came, in how long."""
    steps = [p for p in page.record.points if p["split"] == "train"]
    if not steps:
        return []
    last = steps[-1]
    seconds = timedelta(seconds=round(page.record.training_seconds()))
    found = [("Epochs", f"{last['epoch']:g}", f"of {page.epochs:g}, step {last['step']:,.0f}")]
    found.append(("Time of all steps", str(seconds), "evaluation not counted"))
    if "img/s" in last:
        found.append(("Images a second", f"{last['img/s']:,.0f}", "at the end"))
    return found


def curves(record: RunRecord, columns: Sequence[str]) -> Html:
    """A chart per kind of figure, and the evaluations as a table."""
    series = series_of(record.points)
    charts = []
    for title, (label, figures) in PICTURES.items():
        chosen = {key: points for key, points in series.items() if key[1] in figures}
        kinds = {figure for _, figure in chosen}
        lines = {
            split if len(kinds) == 1 else f"{split} {figure}": points
            for (split, figure), points in chosen.items()
        }
        if lines:
            charts.append(chart(lines, label, title))
    if not charts:
        return element("section", element("h2", "Curves"), element("p", "Nothing is logged yet."))
    shown = list(record.evaluations().items())[:MOST_SETS]
    return element(
        "section",
        element("h2", "Curves"),
        element("div", *charts, class_="charts"),
        *(evaluations(test, points, columns) for test, points in shown),
    )


def evaluations(test: str, points: list[dict], columns: Sequence[str]) -> Html:
    """The figures of each evaluation of a test set, the last ones of very many."""
    logged = list(dict.fromkeys(name for point in points for name in point))
    names = [name for name in columns or logged if name in logged and name not in NOT_METRICS]
    rows = [
        [f"{p['epoch']:g}", *(number(f"{p[n]:.4f}" if n in p else "-") for n in names)]
        for p in points[-MOST_EVALUATIONS:]
    ]
    caption = f"Evaluations on {test}"
    more = f", the last {len(rows)} of {len(points)}" if len(points) > len(rows) else ""
    shown = table(["epoch", *names], rows, caption + more)
    return element("details", element("summary", f"{caption}, as numbers"), shown)


def model(facts: ModelCost | str) -> Html:
    """The stages, with what they cost."""
    if isinstance(facts, str):
        content = element("p", facts, class_="reason")
    else:
        rows = [[row[0], *map(number, map(grouped, row[1:]))] for row in facts.stages]
        rows.append(["total", *map(number, ["", "", "", *map(grouped, facts[:2])])])
        head = ["part", "attention", "tokens", "width", "parameters", "multiply-accumulates"]
        content = table(head, rows, "The model, for one image")
    return element("section", element("h2", "Model"), content)


def config(settings: list[Setting]) -> Html:
    """What differs from the defaults, and every key."""
    changed = [s for s in settings if s.default is not None]
    rows = [[_key(s), _value(s.value), _value(s.default)] for s in changed]
    rows_of_all = [
        element("tr", element("th", _key(s), scope="row"), element("td", _value(s.value)),
                class_="changed" if s.default is not None else None)
        for s in settings
    ]  # fmt: skip
    heads = element("tr", element("th", "key", scope="col"), element("th", "value", scope="col"))
    whole = element(
        "table",
        element("caption", "Every key as it was in force; those that differ are coloured"),
        element("thead", heads),
        element("tbody", *rows_of_all),
    )
    return element(
        "section",
        element("h2", "Config"),
        table(["key", "value", "default"], rows, f"{len(rows)} keys differ from the defaults"),
        element(
            "details", element("summary", "The whole config"), scrolled(whole, "The whole config")
        ),
    )


def _value(text: str | None) -> Html:
    return name(text, LONGEST_VALUE)


def _key(setting: Setting) -> Html:
    return element("span", setting.key, class_="key")


def starts(record: RunRecord) -> Html:
    """The command and the machine; of a run that was resumed each start."""
    parts = [element("h2", "Command and machine")]
    for title, found in (("Started", record.commands), ("On", record.environments)):
        if not found:
            continue
        when, what = found[-1]
        parts += [element("h3", f"{title} {when}"), element("pre", what)]
        earlier = found[-1 - MOST_STARTS : -1]
        if earlier:
            listed = [element("pre", f"# {when}\n{what[:2000]}") for when, what in earlier]
            summary = element("summary", f"{len(found) - 1} earlier")
            parts.append(element("details", summary, *listed))
    return element("section", *parts)


def grouped(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def short(count: float) -> str:
    """18,200,000 -> 18.2 M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:g}"
