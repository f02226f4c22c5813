"""Every optimizer resumes bit for bit, with its state by parameter name.

timm's lamb counts steps per group, not per parameter.
"""

import pytest
import torch

from tests.common.toy_engine import DTYPE, toy_model
from vil.engine.checkpoint.save_load import TrainObjects, TrainState, resume, save
from vil.engine.distributed import DistInfo
from vil.engine.loop import set_lr
from vil.optim import OPTIMIZERS, build_optimizer, decay_groups

pytestmark = pytest.mark.smoke

OURS = [name for name in OPTIMIZERS if not name.startswith("apex")]
SCALER = torch.amp.GradScaler("cpu", enabled=False)


def made(name, layer_decay=1.0):
    """A toy model and its optimizer, with a group per layer where layer_decay is not 1."""
    model = toy_model()
    spare = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    groups = decay_groups(
        model.named_parameters(),
        0.05,
        0.0,
        spare,
        layers={name: int(name[0]) for name, _ in model.named_parameters()},
        layer_decay=layer_decay,
    )
    return model, build_optimizer(name, groups, lr=0.01, eps=1e-3)


def run(model, optimizer, steps):
    for step in steps:
        images = torch.randn(4, 3, 2, 2, dtype=DTYPE, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        set_lr(optimizer, 0.01 / (step + 1))
        optimizer.step()


@pytest.mark.parametrize("name", OURS)
def test_unfrozen_parameters_start_without_state(tmp_path, name, capsys):
    model, optimizer = made(name)
    model[1].requires_grad_(False)
    frozen = set(model[1].parameters())
    for group in optimizer.param_groups:
        pairs = [(n, p) for n, p in zip(group["param_names"], group["params"]) if p not in frozen]
        group["param_names"], group["params"] = map(list, zip(*pairs))
    run(model, optimizer, range(3))
    state = TrainState(0, 1, 4, 5, name, step=3)
    save(tmp_path, TrainObjects(model, optimizer, SCALER), state, dist=DistInfo(), keep=1)
    resumed, its_optimizer = made(name)
    before = resumed[1].weight.detach().clone()
    fresh = TrainState(0, 1, 4, 5, name)
    objects = TrainObjects(resumed, its_optimizer, SCALER)
    resume(tmp_path, fresh, objects, dist=DistInfo(), say=print)
    told = capsys.readouterr().out
    assert "2 parameters have no saved optimizer state, the first: 1.weight" in told
    run(resumed, its_optimizer, range(3, 5))
    assert not torch.equal(before, resumed[1].weight)
    assert all(p.isfinite().all() for p in resumed.parameters())


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("before", "after"), [(1.0, 1.0), (0.9, 0.9), (1.0, 0.9), (0.9, 1.0)])
def test_every_optimizer_resumes(tmp_path, name, before, after):
    """Also if layer-wise learning rates, and so the groups, were switched on or off."""
    model, optimizer = made(name, before)
    run(model, optimizer, range(3))
    state = TrainState(0, 1, 4, 5, name, step=3)
    save(tmp_path, TrainObjects(model, optimizer, SCALER), state, dist=DistInfo(), keep=1)
    resumed, its_optimizer = made(name, after)
    fresh, objects = TrainState(0, 1, 4, 5, name), TrainObjects(resumed, its_optimizer, SCALER)
    assert resume(tmp_path, fresh, objects, dist=DistInfo(), say=print) == state
    if before == after:
        run(model, optimizer, range(3, 6))
        run(resumed, its_optimizer, range(3, 6))
    else:  # with equal learning rates only state and counters matter
        for each, its in ((model, optimizer), (resumed, its_optimizer)):
            for group in its.param_groups:
                group["lr_scale"] = 1.0
            run(each, its, range(3, 6))
    for ours, theirs in zip(resumed.parameters(), model.parameters()):
        assert torch.equal(ours, theirs)
