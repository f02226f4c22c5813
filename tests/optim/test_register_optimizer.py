"""A user's own optimizers and schedules: registered, built by name, checked at registration."""

import pytest
import torch
from torch import nn

from vil.optim import (
    OPTIMIZERS,
    SCHEDULES,
    Schedule,
    build_optimizer,
    decay_groups,
    register_optimizer,
    register_schedule,
)
from vil.utils.registry import Key

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def unregister():
    yield
    for registry in (OPTIMIZERS, SCHEDULES):
        for name in [name for name in registry if name.startswith("mine")]:
            registry.remove(name)


def rprop(groups, settings, *, shrink=0.5):
    return torch.optim.Rprop(groups, lr=settings.lr, etas=(shrink, 1.2))


def test_a_registered_optimizer_gets_its_settings_and_its_own_arguments():
    keys = {"shrink": Key("OPTIM.MINE.SHRINK", 0.5, "factor of a changed sign")}
    register_optimizer("mine", rprop, keys=keys, can_shard=True, about="Rprop")
    assert OPTIMIZERS.entry("mine").key_names == {"shrink": "OPTIM.MINE.SHRINK"}
    assert OPTIMIZERS.entry("mine").facts["can_shard"]
    groups = decay_groups([("w", nn.Parameter(torch.ones(2)))], 0.1, 0.0)
    optimizer = build_optimizer("mine", groups, lr=0.3, own={"shrink": 0.25})
    assert optimizer.param_groups[0]["etas"] == (0.25, 1.2)
    assert optimizer.param_groups[0]["lr"] == 0.3
    with pytest.raises(ValueError, match="the optimizer 'mine' already exists"):
        register_optimizer("mine", rprop)


def fails(groups, settings):
    raise RuntimeError("no kernel")


def without_names(groups, settings):
    return torch.optim.SGD([p for group in groups for _, p in group["params"]], lr=settings.lr)


class NotWritten(torch.optim.Optimizer):
    def __init__(self, groups, settings):
        super().__init__(groups, {"lr": settings.lr})


class Idle(NotWritten):
    def step(self):
        """Update nothing."""


class Infinite(NotWritten):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.div_(0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (fails, r"'mine': build\(groups, settings, \*\*own\) raises RuntimeError: no kernel"),
        (lambda groups, settings: settings, "torch.optim.Optimizer, not Settings"),
        (without_names, "must keep 'param_names', 'lr' and 'lr_scale' in each parameter group"),
        (Idle, "must change every parameter.* of weight is 1 after the step"),
        (Infinite, "weight is inf after the step"),
    ],
)
def test_an_optimizer_that_breaks_the_contract_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        register_optimizer("mine", build)
    assert "mine" not in OPTIMIZERS


def test_an_own_argument_without_a_value_is_refused():
    def build(groups, settings, *, momentum):
        return torch.optim.SGD(groups, lr=settings.lr, momentum=momentum)

    with pytest.raises(ValueError, match="momentum"):
        register_optimizer("mine", build, keys={"momentum": "OPTIM.MOM"})


def test_a_registered_schedule_gets_its_own_arguments():
    def halves(schedule, time, *, every=1):
        return schedule.lr * 0.5 ** (time // every)

    register_schedule("mine", halves, keys={"every": Key("SOLVER.EVERY", 1, "steps to a half")})
    settings = {"lr": 0.8, "steps_per_epoch": 2, "epochs": 3}
    schedule = Schedule("mine", **settings, own={"every": 2})
    assert [schedule.lr_at(step) for step in range(6)] == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]
    assert Schedule("mine", **settings).lr_at(5) == 0.8 / 32
    with pytest.raises(ValueError, match=r"'mine2' must accept the call f\(schedule, time\)"):
        register_schedule("mine2", lambda schedule: 0.1)


def test_a_component_can_be_named_by_its_module():
    register_optimizer("mine", "vil.optim.optimizers:sgd")
    register_schedule("mine", "vil.optim.schedules:cosine")
    groups = decay_groups([("w", nn.Parameter(torch.ones(2)))], 0.1, 0.0)
    assert isinstance(build_optimizer("mine", groups, lr=0.3), torch.optim.SGD)
    settings = {"lr": 0.8, "steps_per_epoch": 2, "epochs": 3}
    assert Schedule("mine", **settings).lr_at(3) == Schedule("cosine", **settings).lr_at(3)
