"""Inject a failing disk into a real run, by --import. $FAULT is the fault as JSON: `what` is rename
or fsync. In a folder of checkpoints, the first `times` calls fail, or each call takes `seconds`."""

import errno
import json
import os
import time

FAULT = json.loads(os.environ.get("FAULT", "null"))  # none when the run resumes
LEFT = [FAULT.get("times", 0) if FAULT else 0]
PLAIN = getattr(os, FAULT["what"]) if FAULT else None


def troubled(first, *rest):
    path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
    if "checkpoints" in path:
        time.sleep(FAULT.get("seconds", 0))
        if LEFT[0]:
            LEFT[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    return PLAIN(first, *rest)


if FAULT:
    setattr(os, FAULT["what"], troubled)
