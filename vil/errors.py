"""Exceptions for problems that a user can fix. `exit_code`: of a command that raises one."""

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
