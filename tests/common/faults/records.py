"""Check the results of the fault tests, whose faults docs/reference/faults.md lists."""

import os


def repeats(full: int) -> int:
    """How often to repeat a fault: `full` times with $VIL_FAULTS_FULL, else a third as often."""
    return full if os.environ.get("VIL_FAULTS_FULL") else max(2, full // 3)


def record(fault: str, what: str, found: object, wanted: object, *, kept: bool | None = None):
    """Fail if a result is not the expected one, and name the fault and the check."""
    kept = found == wanted if kept is None else kept
    assert kept, f"{fault}, {what}: {found}, wanted {wanted}"
