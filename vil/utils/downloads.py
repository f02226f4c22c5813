"""Download files from the Hugging Face Hub with one message for a failure."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hide_retries() -> Iterator[None]:
    """Drop the warnings of huggingface_hub in a `with` block, which come with each of its retries.
    After the last one it raises an exception, see `root_cause`."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(level)


def root_cause(error: BaseException) -> BaseException:
    """Return the first exception in the chain that led to `error`, such as that of the socket."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error
