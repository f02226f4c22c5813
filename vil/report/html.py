"""Render HTML from the package's Jinja templates.

All text is escaped, so that names of classes and files cannot inject markup. Only values of type
`Html` are inserted without escaping.
"""

import base64

from jinja2 import Environment, PackageLoader
from markupsafe import Markup as Html
from markupsafe import escape

LONGEST = 160  # characters of a name


def render_template(file: str, **context: object) -> str:
    """Render a Jinja template as HTML. file: path of the template in the package. context:
    variables of the template; their text is escaped."""
    env = Environment(
        loader=PackageLoader("vil", ""),
        autoescape=True,
        finalize=text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {"name": name, "base64": lambda data: base64.b64encode(data).decode()}
    return env.get_template(file).render(context)


def text(value: object) -> Html:
    """Escape a value for HTML. Control characters and invalid UTF-8 are shown as escapes such as
    \\x00. A value of type `Html` is returned unchanged."""
    if isinstance(value, Html):
        return value
    valid = str(value).encode("utf-8", "backslashreplace").decode()
    clean = "".join(c if c >= " " or c in "\n\t" else repr(c)[1:-1] for c in valid)
    return escape(clean.replace("\x7f", "\\x7f"))


def name(value: object, longest: int = LONGEST) -> Html:
    """Escape a name from the dataset for HTML, and cut it to `longest` characters.

    The name is put in a <bdi> element, so that a right-to-left name does not reorder the page.
    """
    shown = str(value)
    shown = shown if len(shown) <= longest else f"{shown[: longest - 1]}…"
    return Html("<bdi>{}</bdi>").format(text(shown))
