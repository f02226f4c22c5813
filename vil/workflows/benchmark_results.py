"""What the benchmarks share: lists given as text, and the folder of the results."""

import csv
import json
import re
from pathlib import Path

from vil.utils.atomic_write import replace_text
from vil.utils.errors import ConfigError
from vil.utils.machine import slug


def split(text: str, flag: str) -> list[str]:
    """'a,b' -> ['a', 'b'], each once."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise ValueError(f"{flag}: expected names or numbers joined by commas, got {text!r}")
    return found


def number(text: str, flag: str, least: int = 1) -> int:
    """A whole number, not below `least`."""
    if not re.fullmatch(r"[+-]?\d+", text) or int(text) < least:
        raise ValueError(f"{flag}: expected a whole number from {least} on, got {text!r}")
    return int(text)


def result_folder(out: str | None, about: dict, what: str) -> Path:
    """The folder of the results, made before anything is measured."""
    moment = re.sub(r"\D", "", about["date"])[:12]
    default = f"benchmarks/results/{what}-{slug(about['name'])}-{moment}"
    folder = Path(out or default)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from error
    return folder


def write_results(folder: Path, what: str, rows: list[dict], about: dict) -> None:
    """<what>.json, with the machine, and <what>.csv."""
    text = json.dumps({"machine": about, "rows": rows}, indent=1)
    replace_text(folder / f"{what}.json", text + "\n")
    write_csv(folder / f"{what}.csv", rows)


def write_csv(file: Path, rows: list[dict]) -> None:
    """A line per row; a list becomes 56x56."""
    with file.open("w", newline="") as stream:
        lines = csv.DictWriter(stream, list(rows[0]))
        lines.writeheader()
        for row in rows:
            lines.writerow(
                {k: "x".join(map(str, v)) if type(v) is list else v for k, v in row.items()}
            )
