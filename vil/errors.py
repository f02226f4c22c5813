"""Exceptions for problems that a user can fix.

A `vil` command that fails with one of them exits with the `exit_code` of the exception.
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
