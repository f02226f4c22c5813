"""Errors that end a command with one line and a documented exit code.

Codes: 0 success, 1 unexpected error, 2 usage or config, 3 data, 4 checkpoint, 5 diverged, 6 hung,
75 preempted, 130 interrupted. `vil.cli.main` prints an exception that has an `exit_code` as one
line. For other exceptions, it writes the traceback to a file.
"""

import functools
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HUNG = 6
PREEMPTED = 75  # EX_TEMPFAIL: restart the command to resume
INTERRUPTED = 130


class ConfigError(ValueError):
    """Error for an invalid config or command line. Line breaks in the message become spaces."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split("\n")))


class RunInUseError(RuntimeError):
    """Error for a run folder that another process writes to."""

    exit_code = 2


class RunFolderError(RuntimeError):
    """Error for a run folder that cannot be created, written or read."""

    exit_code = 2


class DataError(RuntimeError):
    """Error for a dataset that is missing, invalid, or has more bad images than allowed."""

    exit_code = 3


class CheckpointError(RuntimeError):
    """Error for a weight file or checkpoint that is missing, corrupt, or for another model."""

    exit_code = 4


class SaveError(RuntimeError):
    """Error for a checkpoint or evaluation results that cannot be written."""

    exit_code = 4


class ExportError(RuntimeError):
    """Error for an exported file whose outputs differ from the model's."""

    exit_code = 1


class DivergedError(RuntimeError):
    """Error for a loss, gradients or weights that are NaN or infinite."""

    exit_code = 5


class StoppedError(RuntimeError):
    """Exception that ends a run after a signal, such as SIGTERM, has requested a stop.
    `train_state` is the state that the training loop saved, or None."""

    train_state: Any = None

    def __init__(self, number: signal.Signals):
        super().__init__(f"stopped by {number.name}")
        self.state, self.exit_code = (
            ("interrupted", INTERRUPTED) if number == signal.SIGINT else ("preempted", PREEMPTED)
        )


def one_line(error: Exception) -> str:
    """Return the type of an exception and the first line of its message. For an exception in a
    loader worker, whose message is a traceback, return the last line of the traceback."""
    lines = str(error).strip().splitlines() or [""]
    if lines[1:] and lines[1].startswith("Original Traceback"):
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"


def explain_load_error(error: Exception) -> str:
    """Return a one-line reason why torch.load failed. The reason leaves out torch.load's advice to
    disable weights_only, because loading without weights_only could run code in the file."""
    message = str(error)
    if "unsupported global" in message.lower() or message.startswith("Cannot use ``weights_only"):
        return (
            "it holds pickled objects, which could run code: save a state dict of tensors instead"
        )
    # KeyError of an int: arbitrary bytes, read as a pickle, refer to a missing entry
    is_arbitrary = isinstance(error, KeyError) and isinstance(error.args[0], int)
    if is_arbitrary or "weights_only" in message:
        return "it was not written by torch.save"
    return "it is truncated" if isinstance(error, EOFError) else one_line(error)


def as_config_error(build: Callable) -> Callable:
    """Decorate a function that builds objects from config values, so that it raises ConfigError
    instead of ValueError."""

    @functools.wraps(build)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return build(*args, **kwargs)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error

    return wrapped


@contextmanager
def os_error_as(error_type: type[Exception], prefix: str) -> Iterator[None]:
    """Context manager that converts an OSError in its block to an exception of type `error_type`,
    with the message "<prefix>: <reason>"."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{prefix}: {error.strerror or error}") from error


# {words of the command line in messages: words of Python}
PYTHON_WORDS = {
    "--run": "source",
    "--data": "data",
    "--output_dir": "output_dir",
    "--resume": "resume=True",
    "--import": "imports",
    "--preset": "preset",
    "--tta": "tta",
    "--calibrate": "calibrate=True",
    "--fast (EVAL.FAST)": "EVAL.FAST",
    "command line": "overrides",
    " (see --help)": "",
}


def in_python_words(function: Callable) -> Callable:
    """Decorator for a function that is called from Python. Its errors then name the function's
    arguments, instead of flags of the command line."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ConfigError, DataError, CheckpointError, RunInUseError) as error:
            text = str(error)
            for words, ours in PYTHON_WORDS.items():
                text = re.sub(rf"(?<![\w-]){re.escape(words)}(?![\w-])", ours, text)
            error.args = (text,)
            raise

    return call
