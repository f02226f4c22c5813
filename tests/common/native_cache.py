"""The native library in tests, which is compiled once for all caches."""

import os
from pathlib import Path

import pytest

from vil.ops.native import library

needs_compiler = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())


def cache_with_library(cache: Path) -> str:
    """Create a cache folder that shares the compiled library of all tests. Returns its path."""
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "native").symlink_to(os.environ["VIL_TEST_NATIVE"], target_is_directory=True)
    return str(cache)
