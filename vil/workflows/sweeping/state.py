"""Read the state of a sweep's runs from their folders and from records of their last attempts."""

import json
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

from vil.engine.run_dir import is_locked
from vil.report.run_record import RunRecord
from vil.utils.atomic_write import replace_text
from vil.utils.errors import INTERRUPTED, PREEMPTED, RunFolderError
from vil.utils.json_text import read_dict
from vil.utils.machine import now
from vil.workflows.sweeping.plan import SweepRun

STOPPED = (PREEMPTED, INTERRUPTED)  # exit codes of a run that saved its state and can resume
LOST = 1  # exit code to record for a run that a signal killed
LINE = re.compile(r"^(?:vil [^\s:]+|torchrun)[^:\n]*: (.+)$", re.MULTILINE)  # an error of a command
TAIL = 20_000  # bytes of a run's output that are searched


class RunState(NamedTuple):
    """State of a run.

    state: "pending", "running", "interrupted" (can resume), "failed" or "finished". code: exit code
    of the last attempt to train the run; None if unknown. reason: why this attempt failed, or "".
    step: number of finished training steps.
    """

    state: str
    code: int | None = None
    reason: str = ""
    step: int = 0


def read_state(run: SweepRun) -> RunState:
    """Read the state of a run of a sweep from the files that the run and the sweep wrote."""
    outcome = read_dict(run.outcome_file)
    try:
        status = RunRecord.read(run.folder).status
    except RunFolderError as error:
        return RunState("failed", RunFolderError.exit_code, str(error))
    step = status.get("step", 0)
    code, reason = outcome.get("code"), outcome.get("reason", "")
    if code == 0 and not run.folder.is_dir():  # deleted, to train it again
        return RunState("pending")
    if status.get("state") == "finished" or code == 0:
        return RunState("finished", 0, step=step)
    if is_locked(run.folder):
        return RunState("running", step=step)
    if code is None:  # the sweep was killed before it could write how the run ended
        code, reason = status.get("code"), status.get("reason", "")
    if code is None:
        started = run.output_file.exists() or bool(status)
        return RunState("interrupted" if started else "pending", step=step)
    return RunState("interrupted" if code in STOPPED else "failed", code, reason, step)


def begin_attempt(run: SweepRun) -> float:
    """Delete the record of how the last attempt to train a run ended. Returns the current time."""
    run.outcome_file.unlink(missing_ok=True)
    return time.time()


def end_attempt(run: SweepRun, returncode: int, began: float) -> None:
    """Record how an attempt to train a run ended, in the run's `outcome_file`.

    returncode: return code of the process; negative if a signal killed it. began: result of
    `begin_attempt`.
    """
    code, reason = describe_end(run, returncode, began)
    outcome = {"code": code, "reason": reason, "time": now()}
    replace_text(run.outcome_file, json.dumps(outcome, indent=1) + "\n")


def describe_end(run: SweepRun, returncode: int, began: float) -> tuple[int, str]:
    """Return how an attempt to train a run ended: (exit code, reason of a failure in one line).

    After a success, this is (0, ""). After a failure, it is the first of these that applies:

    - The code and reason in the run's status.json, if the file was written after `began`, the start
      of the attempt. They come first because torchrun itself exits with code 1 after any failure.
    - LOST and the name of the signal, if a signal killed the process (`returncode` < 0).
    - `returncode` and the last error message in the run's output.
    """
    file = run.folder / "status.json"
    status = read_dict(file) if file.is_file() and file.stat().st_mtime >= began - 1 else {}
    if returncode != 0 and status.get("code") and status.get("reason"):
        return status["code"], shorten(status["reason"])
    if returncode < 0:
        hint = " (out of memory?)" if -returncode == signal.SIGKILL else ""
        return LOST, f"killed by signal {-returncode}, {signal.strsignal(-returncode)}{hint}"
    return returncode, "" if returncode == 0 else last_error(run.output_file)


def last_error(file: Path) -> str:
    """Return the last error message in the output of a command. Returns the last line if the output
    has no error message. file: the file with the output."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - TAIL))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return "no output"
    lines = text.strip().splitlines() or ["no output"]
    return shorten((LINE.findall(text) or lines)[-1])


def shorten(text: str) -> str:
    """Join the lines of a text by spaces, and truncate it to 500 characters."""
    return " ".join(text.split())[:500]
