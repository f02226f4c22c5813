"""Fixtures of the tests of operators."""

import pytest
import torch


@pytest.fixture(params=[1, 2, 8])
def threads(request):
    """Run a test with some numbers of threads, and restore theirs afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
