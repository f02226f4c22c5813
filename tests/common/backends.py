"""Leave the registry of backends as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

from vil.ops import BACKENDS


@contextmanager
def restored_backends() -> Iterator[None]:
    """Undo at exit what is registered or removed inside."""
    kept = dict(BACKENDS.entries)
    try:
        yield
    finally:
        BACKENDS.entries.clear()
        BACKENDS.entries.update(kept)
