"""The predicted least times of kernels count the blocks that the kernels walk."""

import pytest
import torch

from vil.bench.kernel_roofline import RATES, count_blocks, count_owned, count_work, predict
from vil.ops import Case, Window, patterns
from vil.ops.layout import Layout

ALL = Window((16, 16), 8)  # four chunks, each of which attends to all tokens
LAYOUT = Layout((16, 16), 8, patterns.local(100))  # the same


@pytest.mark.parametrize("kernel", ["forward", "query", "key"])
@pytest.mark.parametrize("window", [ALL, LAYOUT], ids=["window", "layout"])
def test_blocks_of_full_attention(kernel, window):
    assert count_blocks(kernel, window, 64, 64) == 4 * 4
    assert count_blocks(kernel, window, 32, 16) == 8 * 16


def test_blocks_of_windows():
    assert count_owned(Window((9, 9), 8), 64) == 4  # of 64, 8, 8 and 1 tokens
    assert count_blocks("forward", Window((24, 24), 8), 64, 64) == 4 * 4 + 4 * 6 + 9
    own = Window((24, 24), 8, 0, ((0, 0),))
    assert count_blocks("forward", own, 64, 64) == count_blocks("key", own, 64, 64) == 9
    assert count_blocks("tile", Window((24, 24), 8), 64, 64) == 9 * 9  # absent neighbors too
    assert count_blocks("global", ALL, 64, 16) == 4
    # two rows of queries reach 2 + 2*8 rows of keys, as far as they exist
    assert count_blocks("forward", Window((8, 24), 8, 1), 16, 8 * 16) == 4 * (1 + 2 + 1)


def test_work_includes_padding():
    case = Case(ALL, 2, 3, 48, 1, torch.bfloat16, "cuda")
    work = count_work("forward", case, 64, 64)
    pairs = 6 * (256 * 256 + 256 * 16)
    assert work.exponentials == pairs
    assert work.flops == 2 * 2 * pairs * 64
    assert work.bytes == 6 * 256 * (4 * 48 * 2 + 4)


def test_a_prediction_is_the_longest_of_three_limits():
    case = Case(ALL, 64, 8, 64, 0, torch.bfloat16, "cuda")
    blocks = {"forward": (64, 64), "query": (64, 64), "key": (64, 64)}
    found, rates = predict("sm_80", case, blocks), RATES["sm_80"]
    tensor = 512 * 256 * 64 * 2
    assert found.limits["forward"] == "memory"
    assert found.forward == pytest.approx(1e6 * (4 * tensor + 512 * 256 * 4) / rates.bytes)
    assert found.flash_forward == pytest.approx(1e6 * 4 * tensor / rates.bytes)
    assert found.backward > found.flash_backward  # two kernels read the inputs
    assert found.ratio > 1
