"""Exceptions that tell a user what went wrong, such as an invalid config or missing data.

A `vil` command that ends with one of them exits with the `exit_code` of the exception.
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
