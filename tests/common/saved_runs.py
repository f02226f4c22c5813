"""Copies of the runs in tests/fixtures/saved_runs, which an earlier commit wrote."""

import shutil
from pathlib import Path

import yaml
from fixtures.saved_runs import FOLDER

from tests.common.native_cache import cache_with_library
from vil.tasks import TASKS


def copy_run(name: str, target: Path) -> Path:
    """Copy a run, or with "" all files. Their configs have every key of that commit; those of
    detection are left out where the package lacks that task."""
    shutil.copytree(FOLDER / name, target)
    if not name:
        cache_with_library(target / "cache")
    for path in target.rglob("config.yaml") if "detection" not in TASKS else ():
        config = yaml.safe_load(path.read_text())
        config.pop("DETECTION", None)
        path.write_text(yaml.safe_dump(config))
    return target
