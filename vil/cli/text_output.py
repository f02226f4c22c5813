"""Write text in pieces, to a file or to standard output."""

from collections.abc import Iterable
from pathlib import Path

from vil.utils.output_paths import replacing


def write_pieces(pieces: Iterable[str], file: Path | None) -> None:
    """Write pieces of text one after another to a file or, if `file` is None, to standard output.
    In a file, characters that are not valid UTF-8 are escaped.

    Raises ConfigError if the file cannot be written, and OutputError if standard output cannot be
    written.
    """
    if file:
        escape = dict(encoding="utf-8", errors="backslashreplace", newline="")
        with replacing(file, "--output-file") as aside, aside.open("w", **escape) as stream:
            stream.writelines(pieces)
        return
    for piece in pieces:
        print(piece, end="", flush=True)
