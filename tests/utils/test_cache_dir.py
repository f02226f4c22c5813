"""The user's cache folder."""

import os
import pwd
import tempfile

import pytest

from vil.utils.cache_dir import cache_dir


def test_a_user_without_a_home(tmp_path, monkeypatch):
    """As in a container with an arbitrary user id. A folder of another user is never used."""
    for name in ("VIL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_dir()
    assert folder == tmp_path / f"vil-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    other = os.getuid() + 1
    folder.rename(tmp_path / f"vil-{other}")
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(OSError, match="Not a directory"):
        cache_dir().mkdir(parents=True)
