"""What the faults' tests found, one line per fault, kept for docs/reference/faults_*.md.

`record` asserts and remembers; at the end of a session conftest.py writes all to $VIL_FAULTS_JSON.
"""

FOUND: dict[str, dict] = {}


def record(fault: str, what: str, found: object, wanted: object, *, kept: bool | None = None):
    """Say what a fault's test found, and fail if it is not what was wanted."""
    kept = found == wanted if kept is None else kept
    FOUND.setdefault(fault, {})[what] = {"found": found, "wanted": wanted, "kept": kept}
    assert kept, f"{fault}, {what}: {found}, wanted {wanted}"
