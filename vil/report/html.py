"""Render HTML from the package's templates, and fragments of it for a task's sections.

Every text is escaped except `Html`, so names of classes and files cannot become markup.
"""

import base64

from jinja2 import Environment, PackageLoader
from markupsafe import Markup as Html
from markupsafe import escape

LONGEST = 160  # characters of a name
VOID = {"img", "br"}  # elements without content


def text(value: object) -> Html:
    """Escape text. Control characters, which HTML forbids, and invalid UTF-8 become \\x escapes."""
    if isinstance(value, Html):
        return value
    valid = str(value).encode("utf-8", "backslashreplace").decode()
    clean = "".join(c if c >= " " or c in "\n\t" else repr(c)[1:-1] for c in valid)
    return escape(clean.replace("\x7f", "\\x7f"))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """Return <tag attributes>children</tag>. Attributes that are None are omitted.

    `class_` is written as class, `aria_label` as aria-label.
    """
    words = [tag]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{text(value)}"')
    closing = "" if tag in VOID else f"{''.join(map(text, children))}</{tag}>"
    return Html(f"<{' '.join(words)}>{closing}")


def name(value: object, longest: int = LONGEST) -> Html:
    """Truncate a name from the data, and isolate its text direction from the page's."""
    shown = str(value)
    return element("bdi", shown if len(shown) <= longest else f"{shown[: longest - 1]}…")


def number(value: object) -> Html:
    """Return a right-aligned table cell."""
    return element("td", value, class_="number")


def table(head: list[object], rows: list[list[object]], caption: str, **attributes: object) -> Html:
    """Return a table, scrolled by itself if it is wide, whose first column holds row headers.

    Cells may be <td> elements. The header of a column of numbers is right-aligned.
    """
    is_number = [str(cell).startswith('<td class="number"') for cell in (rows or [head])[0]]
    heads = [
        element("th", cell, scope="col", class_="number" if right else None)
        for cell, right in zip(head, is_number)
    ]
    body = []
    for first, *rest in rows:
        cells = [cell if str(cell).startswith("<td") else element("td", cell) for cell in rest]
        body.append(element("tr", element("th", first, scope="row"), *cells))
    content = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads)),
        element("tbody", *body),
        **attributes,
    )
    return scrolled(content, caption)


def scrolled(content: Html, label: str) -> Html:
    """Wrap wide content, so that it scrolls by itself, also by keyboard."""
    return element("div", content, class_="wide", role="region", aria_label=label, tabindex=0)


def picture(data: bytes, format: str, alt: str) -> Html:
    """Return an image whose file is part of the page."""
    encoded = base64.b64encode(data).decode()
    return element("img", src=f"data:image/{format};base64,{encoded}", alt=alt)


def render_template(file: str, **context: object) -> str:
    """Render a template of this folder."""
    loader = PackageLoader("vil.report", "")
    env = Environment(
        loader=loader, autoescape=True, finalize=text, trim_blocks=True, lstrip_blocks=True
    )
    env.filters["name"] = name
    return env.get_template(file).render(context)
