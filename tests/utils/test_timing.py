"""What is measured of a function: the peak of its tensors, and time that is not negative."""

import pytest
import torch

from vil.utils.timing import peak_tensor_bytes

pytestmark = pytest.mark.smoke

CPU = torch.device("cpu")
MIB = 2**20


def test_the_peak_counts_what_is_alive_together():
    def two_then_one():
        first, second = torch.empty(MIB), torch.empty(MIB)  # 4 MiB each
        del first
        return torch.empty(MIB // 2), second

    assert peak_tensor_bytes(two_then_one, CPU) == pytest.approx(8 * MIB, rel=0.01)


def test_what_was_there_before_does_not_count():
    held = torch.ones(MIB)
    assert peak_tensor_bytes(held.sum, CPU) < MIB / 100
