"""The per-user cache folder, for tuned backends, trusted plug-ins, tracebacks and TSV indices."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $VIL_CACHE if it is set, else the folder vil in $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("VIL_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vil").expanduser()
