"""Mark every test here with `faults`, and write the results to $VIL_FAULTS_JSON."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from tests.common.faults.records import FOUND


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)


def pytest_sessionfinish(session):
    if FOUND and (file := os.environ.get("VIL_FAULTS_JSON")):
        with open(file, "a+") as stream:  # the suite's processes end one after the other
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.seek(0)
            found = json.loads(stream.read() or "{}")
            for fault, rows in FOUND.items():
                found[fault] = found.get(fault, {}) | rows
            stream.truncate(0)
            stream.write(json.dumps(found, indent=1, sort_keys=True) + "\n")
