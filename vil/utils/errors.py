"""Errors that end a command with one line and a documented exit code.

Codes: 0 done, 1 unexpected, 2 usage or config, 3 data, 4 checkpoint, 5 diverged, 6 hung, 75
preempted, 130 interrupted. `vil.cli.main` prints any exception that has an `exit_code` as one line;
all others keep their traceback.
"""

import functools
import signal
from collections.abc import Callable
from typing import Any

HUNG = 6
PREEMPTED = 75  # EX_TEMPFAIL: saved, start me again
INTERRUPTED = 130


def one_line(error: Exception) -> str:
    """The kind of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def of_torch_load(error: Exception) -> str:
    """Why torch.load refused a file, in a line and without its advice to run what is in it."""
    said = str(error)
    if "unsupported global" in said.lower() or said.startswith("Cannot use ``weights_only"):
        return "it holds pickled objects, which could run code; a state dict of tensors would not"
    # an int: arbitrary bytes, read as pickle, speak of an entry that is not there
    bytes_of_others = isinstance(error, KeyError) and isinstance(error.args[0], int)
    if bytes_of_others or "weights_only" in said:
        return "it is no file of torch's"
    return "it ends too early" if isinstance(error, EOFError) else one_line(error)


class ConfigError(ValueError):
    """A config or a command line that cannot be used; the message is one line."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split("\n")))


def as_config_error(build: Callable) -> Callable:
    """Decorate a function that turns settings into objects: a ValueError becomes a ConfigError."""

    @functools.wraps(build)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return build(*args, **kwargs)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error

    return wrapped


class DataError(RuntimeError):
    """A dataset that is missing, empty or broken beyond what the config tolerates."""

    exit_code = 3


class CheckpointError(RuntimeError):
    """A weight file or checkpoint that is missing, damaged or made for another model."""

    exit_code = 4


class RunInUseError(RuntimeError):
    """Another process is writing into the run's folder."""

    exit_code = 2


class RunFolderError(RuntimeError):
    """The run's folder cannot be created or written."""

    exit_code = 2


class SaveError(RuntimeError):
    """A checkpoint, or what an evaluation found, that could not be written."""

    exit_code = 4


class ExportError(RuntimeError):
    """A written file that does not compute what the model does."""

    exit_code = 1


class DivergedError(RuntimeError):
    """The loss is no longer a finite number."""

    exit_code = 5


class StoppedError(RuntimeError):
    """A signal requested a stop, and all ranks know of it.

    train_state: the state that training saved, where there was one.
    """

    train_state: Any = None

    def __init__(self, number: signal.Signals):
        super().__init__(f"stopped by {number.name}")
        self.state, self.exit_code = (
            ("interrupted", INTERRUPTED) if number == signal.SIGINT else ("preempted", PREEMPTED)
        )
