"""The five best classes, by logits and then by index."""

import pytest
import torch

from vil.tasks.image.classes import top_five


@pytest.mark.parametrize("classes", [1, 3, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_five_is_a_stable_sort(classes, dtype):
    torch.manual_seed(classes)
    logits = torch.randint(-2, 3, (50, classes)).to(dtype)  # many equal ones
    logits[::3] = torch.randn_like(logits[::3]) * 1e-40
    logits[::5, 0], logits[1::5, -1], logits[2::5] = -torch.inf, torch.inf, -0.0
    logits[3] = torch.nan
    wanted = logits.argsort(dim=-1, descending=True, stable=True)[:, :5]
    assert torch.equal(top_five(logits), wanted)
