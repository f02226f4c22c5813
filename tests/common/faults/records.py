"""Collect the results of the fault tests for docs/reference/faults_*.md.

`record` asserts and stores a result. At the end of a session, conftest.py writes all results to
$VIL_FAULTS_JSON.
"""

import os

FOUND: dict[str, dict] = {}


def repeats(full: int) -> int:
    """How often to repeat a fault: `full` times for the docs' table, otherwise a third as often."""
    return full if os.environ.get("VIL_FAULTS_JSON") else max(2, full // 3)


def record(fault: str, what: str, found: object, wanted: object, *, kept: bool | None = None):
    """Store the result of a check, and fail if it is not the expected one."""
    kept = found == wanted if kept is None else kept
    FOUND.setdefault(fault, {})[what] = {"found": found, "wanted": wanted, "kept": kept}
    assert kept, f"{fault}, {what}: {found}, wanted {wanted}"
