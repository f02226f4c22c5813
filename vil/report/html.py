"""Render HTML from the package's templates.

All text is escaped, so that names of classes and files cannot inject markup. `Html` marks text that
is already escaped.
"""

import base64

from jinja2 import Environment, PackageLoader
from markupsafe import Markup as Html
from markupsafe import escape

LONGEST = 160  # characters of a name


def render_template(file: str, **context: object) -> str:
    """Render a template, given by its path in the package."""
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
    """Escape text for HTML. Control characters and invalid UTF-8 become escapes."""
    if isinstance(value, Html):
        return value
    valid = str(value).encode("utf-8", "backslashreplace").decode()
    clean = "".join(c if c >= " " or c in "\n\t" else repr(c)[1:-1] for c in valid)
    return escape(clean.replace("\x7f", "\\x7f"))


def name(value: object, longest: int = LONGEST) -> Html:
    """Escape and truncate a name that comes from the data.

    Its text direction is isolated, so that a right-to-left name does not reorder the page.
    """
    shown = str(value)
    shown = shown if len(shown) <= longest else f"{shown[: longest - 1]}…"
    return Html("<bdi>{}</bdi>").format(text(shown))
