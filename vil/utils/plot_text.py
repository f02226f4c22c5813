"""Make names of files, classes and settings safe for matplotlib."""


def plot_text(text: str) -> str:
    """Return text that matplotlib draws as it is.

    Dollar signs are escaped, because text between two of them is parsed as a formula. Characters
    that cannot be printed are replaced, and bytes that are not UTF-8 are escaped.
    """
    valid = text.encode("utf-8", "backslashreplace").decode()
    shown = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in valid
    )
    return shown.replace("$", r"\$")
