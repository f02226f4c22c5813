"""Write text in pieces, to a file or to standard output."""

from collections.abc import Iterable
from pathlib import Path

from vil.utils.output_paths import replacing


def write_pieces(pieces: Iterable[str], file: Path | None) -> None:
    """Write text to a file; to standard output if `file` is None. Invalid UTF-8 in names is
    escaped.

    Raises ConfigError if the file cannot be written, OutputError if standard output cannot.
    """
    if file:
        escape = dict(encoding="utf-8", errors="backslashreplace", newline="")
        with replacing(file, "--output-file") as aside, aside.open("w", **escape) as stream:
            stream.writelines(pieces)
        return
    for piece in pieces:
        print(piece, end="", flush=True)
