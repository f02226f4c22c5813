"""HTML and SVG as nested calls. Every text is escaped, except what such a call has made: data
(names of classes and files, reasons of failures) cannot become markup.
"""

import base64
import html

LONGEST = 160  # signs of a name that are shown
# No script, no network, no frame, whatever a page may hold.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"
NUMBER = '<td class="number">'
VOID = {"meta", "link", "img", "br"}


class Html(str):
    """Markup, already escaped."""


def text(value: object) -> Html:
    """Escaped; control signs, which HTML forbids, and bytes that are not UTF-8 are spelled out."""
    if isinstance(value, Html):
        return value
    whole = str(value).encode("utf-8", "backslashreplace").decode()
    clean = "".join(sign if sign >= " " or sign in "\n\t" else repr(sign)[1:-1] for sign in whole)
    return Html(html.escape(clean.replace("\x7f", "\\x7f")))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """<tag attributes>children</tag>. `class_` is class, `aria_label` aria-label; None and False
    are left out, True stands alone.
    """
    words = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        words.append(name if value is True else f'{name}="{text(value)}"')
    inside = "".join(map(text, children))
    closed = "" if tag in VOID else f"{inside}</{tag}>"
    return Html(f"<{' '.join(words)}>{closed}")


def name(value: object, longest: int = LONGEST) -> Html:
    """A name from the data: cut where it is very long, and on its own where its direction is other
    than the page's."""
    shown = str(value)
    return element("bdi", shown if len(shown) <= longest else f"{shown[: longest - 1]}…")


def table(head: list[object], rows: list[list[object]], caption: str, **attributes: object) -> Html:
    """A table whose first column names its rows. Cells that are cells already stay as they are; the
    heads of numbers stand right, as they do."""
    first = rows[0] if rows else head
    kinds = ["number" if str(cell).startswith(NUMBER) else None for cell in first]
    heads = [element("th", cell, scope="col", class_=kind) for cell, kind in zip(head, kinds)]
    body = [
        element("tr", *(_cell(cell, first=number == 0) for number, cell in enumerate(row)))
        for row in rows
    ]
    inside = [
        element("caption", caption),
        element("thead", element("tr", *heads)),
        element("tbody", *body),
    ]
    return scrolled(element("table", *inside, **attributes), caption)


def scrolled(content: Html, label: str) -> Html:
    """Wide content that scrolls by itself, by keyboard too, so that the page does not."""
    return element("div", content, class_="wide", role="region", aria_label=label, tabindex=0)


def _cell(cell: object, first: bool) -> Html:
    if isinstance(cell, Html) and cell.startswith(("<td", "<th")):
        return cell
    return element("th", cell, scope="row") if first else element("td", cell)


def number(value: object) -> Html:
    """A cell of a number, right-aligned."""
    return element("td", value, class_="number")


def picture(data: bytes, kind: str, described: str, **attributes: object) -> Html:
    """An image inside the page."""
    encoded = base64.b64encode(data).decode()
    return element("img", src=f"data:image/{kind};base64,{encoded}", alt=described, **attributes)


def document(title: str, style: str, *body: Html) -> str:
    """A whole page that needs nothing but itself."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        Html(f"<style>{style}</style>"),
    )
    return f"<!doctype html>\n{element('html', head, element('body', *body), lang='en')}\n"
