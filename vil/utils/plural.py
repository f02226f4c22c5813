"""Write counts with their nouns."""


def plural(count: int, one: str, several: str = "") -> str:
    """Return a count with its noun, such as "1 image" or "2 images".

    one: words for a count of 1. several: words for any other count; by default, `one` with an s.
    """
    return f"{count} {one if count == 1 else several or f'{one}s'}"
