"""One thread per process: scripts/test.sh runs the suite in two, and tests start more.

Set in the environment before torch is imported, so that the processes tests start inherit it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

torch.set_num_threads(1)
