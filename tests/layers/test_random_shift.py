"""Random shift: the neighbor is a function of the step, and the epoch at which it ends."""

import pytest
import torch

import vil
from vil.layers.attention import set_progress
from vil.utils.train_step import TrainStep

pytestmark = pytest.mark.smoke


def test_random_shift_needs_the_step():
    """Without it every step would silently sample the same neighbor."""
    module = vil.build_attention("longformer", dim=4, num_heads=1, window=2, mode=1)
    with pytest.raises(RuntimeError, match="set_progress"):
        module(torch.randn(1, 5, 4), (2, 2))
    module.eval()(torch.randn(1, 5, 4), (2, 2))


def test_random_shift_is_a_function_of_seed_step_and_module():
    def draws(seed: int) -> list[tuple[int, int]]:
        modules = torch.nn.ModuleList(
            vil.build_attention("longformer", dim=4, num_heads=1, window=2, mode=1)
            for _ in range(2)
        )
        out = []
        for step in range(100):
            set_progress(modules, TrainStep(seed=seed, step=step))
            out.append(tuple(module.current_mode() for module in modules))
        return out

    first = draws(0)
    assert first == draws(0)
    assert first != draws(1)
    assert {mode for pair in first for mode in pair} == set(range(1, 9))
    assert any(a != b for a, b in first)


def test_random_shift_ends_at_the_switch_epoch(caplog):
    module = vil.build_attention(
        "longformer", dim=4, num_heads=1, window=2, mode=1, mode_switch=0.75
    )
    modes = []
    with caplog.at_level("INFO"):
        for epoch in range(10):
            set_progress(module, TrainStep(step=epoch, epoch=epoch, epochs=10))
            modes.append(module.current_mode())
    assert all(mode > 0 for mode in modes[:8])  # 0.75 * 10 = 7.5: epochs 0..7
    assert modes[8:] == [0, 0]
    (record,) = caplog.records
    assert "from epoch 8" in record.getMessage()
    assert module.eval().current_mode() == 0
