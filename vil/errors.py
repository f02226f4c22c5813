"""The exceptions that vil raises for what a user can mend; `exit_code` is that of a command."""

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
