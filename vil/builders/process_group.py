"""This process among those that torchrun started."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from yacs.config import CfgNode

from vil.engine import distributed
from vil.engine.distributed import DistInfo
from vil.utils.errors import as_config_error


@contextmanager
def process_group(cfg: CfgNode, device: torch.device) -> Iterator[DistInfo]:
    """Join the other processes, if there are any, and leave their group at the end.

    A group that the caller has initialized is used and stays.
    """
    if torch.distributed.is_initialized():
        yield distributed.current()
        return
    backend = {"cuda": cfg.DISTRIBUTED_BACKEND}.get(device.type)  # gloo on a CPU
    dist = as_config_error(distributed.start)(backend, device)
    try:
        yield dist
    finally:
        distributed.stop()
