"""Errors that end a command with one line and a documented exit code.

Codes: 0 done, 1 unexpected, 2 usage or config, 3 data, 4 checkpoint, 5 diverged, 6 hung, 75
preempted, 130 interrupted. `vil.cli.main` prints any exception that has an `exit_code` as one line;
all others keep their traceback.
"""

import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HUNG = 6
PREEMPTED = 75  # EX_TEMPFAIL: the state is saved, restart the command
INTERRUPTED = 130


class ConfigError(ValueError):
    """A config or command line that cannot be used. The message is one line."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split("\n")))


class RunInUseError(RuntimeError):
    """Another process writes to the run's folder."""

    exit_code = 2


class RunFolderError(RuntimeError):
    """The run's folder cannot be created or written."""

    exit_code = 2


class DataError(RuntimeError):
    """A dataset that is missing, empty or has more errors than the config tolerates."""

    exit_code = 3


class CheckpointError(RuntimeError):
    """A weight file or checkpoint that is missing, corrupt or of another model."""

    exit_code = 4


class SaveError(RuntimeError):
    """A checkpoint or an evaluation's results could not be written."""

    exit_code = 4


class ExportError(RuntimeError):
    """An exported file whose outputs differ from the model's."""

    exit_code = 1


class DivergedError(RuntimeError):
    """Loss, gradients or weights are NaN or infinite."""

    exit_code = 5


class StoppedError(RuntimeError):
    """A signal requested a stop, and all ranks know of it.

    train_state: the state that training saved, if it did.
    """

    train_state: Any = None

    def __init__(self, number: signal.Signals):
        super().__init__(f"stopped by {number.name}")
        self.state, self.exit_code = (
            ("interrupted", INTERRUPTED) if number == signal.SIGINT else ("preempted", PREEMPTED)
        )


def one_line(error: Exception) -> str:
    """The type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def explain_load_error(error: Exception) -> str:
    """Explain in one line why torch.load refused a file, without its advice to run the content."""
    message = str(error)
    if "unsupported global" in message.lower() or message.startswith("Cannot use ``weights_only"):
        return "it holds pickled objects, which could run code; a state dict of tensors would not"
    # an int: arbitrary bytes, read as a pickle, refer to an entry that does not exist
    is_arbitrary = isinstance(error, KeyError) and isinstance(error.args[0], int)
    if is_arbitrary or "weights_only" in message:
        return "it is not a file of torch.save"
    return "it ends too early" if isinstance(error, EOFError) else one_line(error)


def as_config_error(build: Callable) -> Callable:
    """Decorate a function that builds objects from settings: its ValueError becomes ConfigError."""

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
    """Raise an OSError of the block as an `error_type` with the message "<prefix>: <reason>"."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{prefix}: {error.strerror or error}") from error
