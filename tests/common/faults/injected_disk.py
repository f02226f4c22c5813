"""A disk that fails, for a real run, given to it by --import. $FAULT says how, as JSON: `what`,
os.rename or os.fsync, of something in a folder of checkpoints, fails so many `times` at first, or
takes so many `seconds`."""

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
