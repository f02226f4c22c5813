"""Make names of files, classes and settings safe for matplotlib."""


def plot_text(text: str) -> str:
    """Escape a text, so that matplotlib draws it literally.

    Dollar signs are escaped, because matplotlib parses text between two of them as a formula.
    Characters that cannot be printed are replaced, and bytes that are not UTF-8 are escaped.
    """
    valid = text.encode("utf-8", "backslashreplace").decode()
    shown = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in valid
    )
    return shown.replace("$", r"\$")
