"""A process group of one process, and what it sends to the others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as torch_dist


@contextmanager
def one_rank() -> Iterator[None]:
    """A group that a user's script has initialized."""
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch_dist.destroy_process_group()


@contextmanager
def broadcasts(monkeypatch) -> Iterator[list]:
    """What rank 0 of a group sends to the others inside of the block."""
    sent = []
    with one_rank(), monkeypatch.context() as patch:
        patch.setattr(torch_dist, "broadcast_object_list", lambda box, src: sent.extend(box))
        yield sent
