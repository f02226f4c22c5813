"""Save and restore the global state of the process that a run changes."""

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_global_state() -> Iterator[None]:
    """Restore global state at the end of a `with` block: the random generators of torch, NumPy and
    Python, torch's global settings, the environment variables, and the level and handlers of the
    logger "vil"."""
    log = logging.getLogger("vil")
    environment, level, handlers = dict(os.environ), log.level, list(log.handlers)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    tf32 = torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    saved = [
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled()),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
    ]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for restore, value in saved:
            restore(value)
        torch.backends.cudnn.allow_tf32 = tf32
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        log.setLevel(level)
        log.handlers[:] = handlers
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
