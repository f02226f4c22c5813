"""Check the paths of output files before a command starts to work, and write files atomically."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vil.utils.atomic_write import write_aside
from vil.utils.errors import ConfigError, os_error_as

IMAGE_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")
# Files of a run's folder that its report, evaluation and resumption read.
RUN_FILES = {"config.yaml", "classes.txt", "metrics.jsonl", "status.json", "log.txt", "run.lock"}


def output_file(
    given: str | Path,
    flag: str = "--out",
    endings: tuple[str, ...] = (),
    inputs: Iterable[str | Path] = (),
) -> Path:
    """Return the path of an output file, after checking that it may be written.

    Args:
        flag: the option that sets the path, for error messages.
        endings: the allowed suffixes; () allows any.
        inputs: files that the command reads, which must not be overwritten.

    Raises ConfigError if the suffix is not allowed, if the file cannot be written, or if the path
    is a folder, a file that vil needs in a run's folder, or one of `inputs` (also through a link).
    """
    path = Path(given)
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"{flag} {given}: expected a name that ends in {', '.join(endings)}")
    with os_error_as(ConfigError, f"{flag} {given}"):
        if path.is_dir():
            raise ConfigError(f"{flag} {given}: Is a directory")
        if not path.parent.is_dir():
            raise ConfigError(f"{flag} {given}: there is no folder {path.parent}")
        refuse_run_files(path, flag)
        refuse_inputs(path, flag, inputs)
        folder = path.resolve().parent
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {given}: Permission denied")
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
    """Raise ConfigError if an output path is inside a run's checkpoints folder, or is one of the
    files in a run's folder that vil reads later (RUN_FILES). flag: the option that sets the path.
    """
    real = path.resolve()
    if real.name in RUN_FILES and (real.parent / "config.yaml").exists():
        raise ConfigError(f"{flag} {path}: used by the run {real.parent}; choose another name")
    for folder in (real, *real.parents):
        if folder.name == "checkpoints" and (folder.parent / "config.yaml").exists():
            raise ConfigError(
                f"{flag} {path} is inside the checkpoints of the run {folder.parent}; "
                "choose another path"
            )


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


def make_folder(path: str | Path, flag: str) -> Path:
    """Create a folder and its parents, and return its path. flag: the option that sets the path,
    for messages. Raises ConfigError if the folder cannot be created, or if it is inside a run's
    checkpoints."""
    with os_error_as(ConfigError, f"{flag} {path}"):
        refuse_run_files(Path(path), flag)
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)
