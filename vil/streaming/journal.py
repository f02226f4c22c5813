"""Record the progress of a streamed forward pass, so that another process can resume it.

The record is a file with the number of the current pass, its next strip and the running sums. It is
replaced atomically. The tokens before the next strip are complete in the scratch files.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vil.utils.atomic_write import write_aside
from vil.utils.errors import SaveError, os_error_as
from vil.utils.torch_file import load_torch_file

State = Mapping[str, Any]
SAVE_SECONDS = 1.0  # between two records within a pass


class Journal:
    """The progress of a streamed forward pass. This base class records nothing. The subclass
    `FileJournal` records the progress, so that another process can resume."""

    def state_of(self, number: int) -> State | None:
        """Return the recorded state of pass `number` over the image, or None if it has no record.
        state["strip"] is the next strip to compute, or None if the pass is complete."""
        return None

    def save(self, number: int, describe: Callable[[], State]) -> None:
        """Record the state of pass `number` after a strip. A subclass may skip the record for some
        of the strips. describe: function that returns the state."""

    def complete(self, number: int, state: State) -> None:
        """Record that pass `number` is complete. state: its final state."""


class FileJournal(Journal):
    """A file that records the progress of a streamed forward pass.

    fingerprint: text that identifies the model, the image and the `StreamPlan`. An existing record
    with another fingerprint is ignored.
    """

    def __init__(self, file: Path, fingerprint: str) -> None:
        self.file, self.fingerprint = file, fingerprint
        self.saved_at = time.monotonic()
        record = self._read()
        self.number = -1 if record is None else record["number"]
        self.state = None if record is None else record["state"]
        self.completed = {} if record is None else record["completed"]

    @property
    def is_resumed(self) -> bool:
        """Whether the file had a record with the same fingerprint, from an earlier process."""
        return self.number >= 0

    def _read(self) -> dict[str, Any] | None:
        try:
            record = load_torch_file(self.file)
            return record if record["fingerprint"] == self.fingerprint else None
        except Exception:  # no record, or a corrupt one: start from the beginning
            return None

    def state_of(self, number: int) -> State | None:
        if number in self.completed:
            return self.completed[number]
        return self.state if number == self.number else None

    def save(self, number: int, describe: Callable[[], State]) -> None:
        if time.monotonic() - self.saved_at >= SAVE_SECONDS:
            self._write(number, describe())

    def complete(self, number: int, state: State) -> None:
        self.completed[number] = state
        self._write(number + 1, None)

    def _write(self, number: int, state: State | None) -> None:
        record = {
            "fingerprint": self.fingerprint,
            "number": number,
            "state": state,
            "completed": self.completed,
        }
        with (
            os_error_as(SaveError, f"{self.file}"),
            write_aside(self.file) as aside,
            aside.open("wb") as stream,
        ):
            torch.save(record, stream)
        self.saved_at = time.monotonic()
