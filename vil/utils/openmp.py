"""How the threads of OpenMP wait, with which torch computes on CPUs."""

import os


def spin_briefly() -> None:
    """Let OpenMP's threads wait in a loop for only a short time, before they sleep.

    By default they wait for so long that steps take many times longer when another program uses one
    of the cores. Has an effect only before torch is imported. Does nothing if the user has set
    OMP_WAIT_POLICY or GOMP_SPINCOUNT.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
