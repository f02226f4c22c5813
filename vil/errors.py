"""Exceptions that tell a user what went wrong, such as an invalid config or missing data.

If one of these exceptions ends a `vil` command, the command exits with the exception's `exit_code`.
"""

# ruff: noqa: F401

from vil.utils.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    ExportError,
    RunFolderError,
    RunInUseError,
    SaveError,
    StoppedError,
)
