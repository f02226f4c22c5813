"""Check the paths of output files before a command starts to work, and write files atomically."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vil.utils.atomic_write import write_aside
from vil.utils.errors import ConfigError, os_error_as

IMAGE_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")
# Files and folders that training and evaluation write in a run's folder, and that later commands
# read; listed in docs/reference/run_folder.md. Others, such as report.html, may be replaced.
RUN_ENTRIES = {
    "config.yaml", "command.txt", "env.txt", "status.json", "log.txt", "metrics.jsonl", "tb",
    "trackers.json", "plots", "checkpoints", "autotune.json", "classes.txt", "bad_samples.txt",
    "crash", "run.lock", "eval", "calibration.json", "test_results.json",
}  # fmt: skip


def output_file(
    given: str | Path,
    flag: str = "--out",
    endings: tuple[str, ...] = (),
    inputs: Iterable[str | Path] = (),
    *,
    beside: Iterable[str | Path] = (),
    data: str | Path | None = None,
) -> Path:
    """Return the path of an output file, after checking that it may be written.

    Args:
        flag: the option that sets the path, for error messages.
        endings: the allowed suffixes; () allows any.
        inputs: files that the command reads, which must not be overwritten.
        beside: further files that the command writes. They are checked like `given`, and an
            existing one is replaced only together with an existing `given`.
        data: folder of the data that the command reads, in which no file must be overwritten.

    Raises ConfigError if the suffix is not allowed, if a file cannot be written, or if a path is a
    folder, belongs to a run (see `refuse_run_files`), or is one of `inputs` (also through a link).
    """
    path, inputs = Path(given), list(inputs)
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"{flag} {given}: expected a name that ends in {', '.join(endings)}")
    for file in (path, *map(Path, beside)):
        with os_error_as(ConfigError, f"{flag} {file}"):
            if file.is_dir():
                raise ConfigError(f"{flag} {file}: Is a directory")
            if not file.parent.is_dir():
                raise ConfigError(f"{flag} {file}: there is no folder {file.parent}")
            refuse_run_files(file, flag)
            refuse_inputs(file, flag, inputs)
            real = file.resolve()
            if data and file.exists() and real.is_relative_to(Path(data).resolve()):
                raise ConfigError(
                    f"{flag} {file} exists in the folder of the data, {data}: choose another name"
                )
            if file != path and file.exists() and not path.exists():
                raise ConfigError(
                    f"{flag} {given}: the command would replace {file} too; choose another name"
                )
        if not os.access(file if file.exists() else real.parent, os.W_OK):
            raise ConfigError(f"{flag} {file}: Permission denied")
    return path


def refuse_inputs(path: Path, flag: str, inputs: Iterable[str | Path]) -> None:
    """Raise ConfigError if an output path is the same file as one of the command's input files.
    flag: the option that sets the path, for the message."""
    if not path.exists():
        return
    for file in inputs:
        if os.path.exists(file) and path.samefile(file):
            raise ConfigError(f"{flag} {path}: the command reads this file; choose another name")


def refuse_run_files(path: Path, flag: str) -> None:
    """Raise ConfigError if an output path is one of RUN_ENTRIES in the folder of a run, or inside
    one of these folders. flag: the option that sets the path."""
    real = path.resolve()
    for folder in real.parents:
        entry = real.relative_to(folder).parts[0]
        if entry in RUN_ENTRIES and is_run(folder):
            text = "is used by" if entry == real.name else f"is inside the {entry} of"
            raise ConfigError(f"{flag} {path} {text} the run {folder}; choose another path")


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, also of one without a checkpoint yet."""
    names = ("checkpoints", "status.json")
    return (folder / "config.yaml").exists() and any((folder / n).exists() for n in names)


def int8_file(path: str | Path) -> Path:
    """Return the path of the file with int8 layers that an export writes next to `path`."""
    path = Path(path)
    return path.with_name(f"{path.stem}.int8{path.suffix or '.onnx'}")


@contextmanager
def replacing(path: Path, flag: str = "--out") -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` at the end of the `with` block.

    If the block raises an exception, `path` does not change. If `path` is a link, its target is
    replaced. A device or a named pipe is yielded itself. An OSError is raised as ConfigError. flag:
    the option that sets the path, for the message.
    """
    with os_error_as(ConfigError, f"{flag} {path}"):
        real = path.resolve()
        if real.exists() and not stat.S_ISREG(real.stat().st_mode):
            yield real
            return
        with write_aside(real) as aside:
            yield aside


def make_folder(path: str | Path, flag: str, below: str = "") -> Path:
    """Create a folder and its parents, and return its path. flag: the option that sets the path,
    for messages. below: path of a folder to create in it, which is returned instead. Raises
    ConfigError if the folder cannot be created, or if `path` belongs to a run, see
    `refuse_run_files`."""
    folder = Path(path, below)
    with os_error_as(ConfigError, f"{flag} {folder}"):
        refuse_run_files(Path(path), flag)
        folder.mkdir(parents=True, exist_ok=True)
    return folder
