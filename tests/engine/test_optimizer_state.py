"""Every optimizer, also of timm, resumes bit for bit, with its state by parameter name.

timm's lamb counts steps per group, not per parameter.
"""

from itertools import product

import pytest
import torch
from torch import nn

from tests.common.marks import cases
from vil.engine.checkpoint.save_load import TrainObjects, TrainState, load, resume, save
from vil.engine.distributed import DistInfo
from vil.engine.loop import seed_step, set_lr
from vil.optim import OPTIMIZERS, build_optimizer, decay_groups
from vil.utils.errors import CheckpointError

pytestmark = pytest.mark.smoke

OURS = [name for name in OPTIMIZERS if not name.startswith("apex")]
ENTRIES = {n: e for n, e in OPTIMIZERS.all_entries().items() if n.startswith("timm/")}
TIMM = sorted(name for name, entry in ENTRIES.items() if "refused" not in entry.facts)
RUNS_OF_TIMM = [(name, 0.9, 0.9) for name in TIMM]  # and the layer decays before and after
SWITCHES = [(1.0, 1.0), (0.9, 0.9), (1.0, 0.9), (0.9, 1.0)]
RUNS = [(name, *switch) for name in OURS for switch in SWITCHES] + RUNS_OF_TIMM
LR = 0.01


def made(name, layer_decay=1.0, **settings):
    """A model with parameters of every kind: convolution, matrices, vectors, and a table without
    decay; and its optimizer, with a group per layer where layer_decay is not 1."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(),
        nn.Linear(16, 20),
    )  # fmt: skip
    model[4].table = nn.Parameter(torch.randn(8, 16))
    no_decay = {name for name, p in model.named_parameters() if p.ndim < 2 or "table" in name}
    options = dict(
        layers={name: int(name[0]) for name, _ in model.named_parameters()}, layer_decay=layer_decay
    )
    groups = decay_groups(model.named_parameters(), 0.05, 0.0, no_decay, **options)
    optimizer = build_optimizer(name, groups, lr=LR, **settings)
    return TrainObjects(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))


def run(objects, start, stop):
    model, optimizer = objects.model, objects.optimizer
    for step in range(start, stop):
        seed_step(0, step, 0)
        set_lr(optimizer, LR / (1 + step))
        optimizer.zero_grad()
        outputs = model(torch.randn(4, 3, 2, 2)) + model[4].table.square().mean()
        outputs[:, :10].square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OURS)
def test_unfrozen_parameters_start_without_state(tmp_path, name, capsys):
    objects = made(name)
    objects.model[3].requires_grad_(False)
    frozen = set(objects.model[3].parameters())
    for group in objects.optimizer.param_groups:
        pairs = [(n, p) for n, p in zip(group["param_names"], group["params"]) if p not in frozen]
        group["param_names"], group["params"] = map(list, zip(*pairs))
    run(objects, 0, 3)
    save(tmp_path, objects, TrainState(0, 1, 4, 5, name, step=3), dist=DistInfo(), keep=1)
    resumed = made(name)
    before = resumed.model[3].weight.detach().clone()
    resume(tmp_path, TrainState(0, 1, 4, 5, name), resumed, dist=DistInfo(), say=print)
    told = capsys.readouterr().out
    assert "2 parameters have no saved optimizer state, the first: 3.weight" in told
    run(resumed, 3, 5)
    assert not torch.equal(before, resumed.model[3].weight)
    assert all(p.isfinite().all() for p in resumed.model.parameters())


@pytest.mark.filterwarnings("ignore:It is highly recommended")
@pytest.mark.parametrize("run_of", cases(RUNS, long=RUNS_OF_TIMM), ids=str)
def test_every_optimizer_resumes(tmp_path, run_of):
    """Also if layer-wise learning rates, and so the groups, were switched on or off."""
    name, before, after = run_of
    objects, resumed = made(name, before), made(name, after)
    initial = {k: v.clone() for k, v in objects.model.state_dict().items()}
    run(objects, 0, 3)
    state = TrainState(0, 1, 4, 5, name, step=3)
    save(tmp_path, objects, state, dist=DistInfo(), keep=1)
    fresh = TrainState(0, 1, 4, 5, name)
    assert resume(tmp_path, fresh, resumed, dist=DistInfo(), say=print) == state
    for each in (objects, resumed):
        if before != after:  # with equal learning rates only state and counters matter
            for group in each.optimizer.param_groups:
                group["lr_scale"] = 1.0
        run(each, 3, 6)
    for key, value in objects.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[key]), key
        assert value.isfinite().all(), key
        assert not torch.equal(value, initial[key]), key


def every_tensor(change):
    def changed(state):
        return {
            name: {
                key: change(v) if torch.is_tensor(v) and v.numel() > 1 else v
                for key, v in own.items()
            }
            for name, own in state.items()
        }

    return changed


WRONG_STATES = {
    "one row": every_tensor(lambda tensor: tensor[:1]),
    "a number": every_tensor(lambda tensor: torch.tensor(1.0)),
    "more rows": every_tensor(lambda tensor: torch.cat([tensor] * 3)),
    "expanded": every_tensor(lambda tensor: torch.zeros(1).expand_as(tensor)),
    "sparse": every_tensor(lambda tensor: tensor.to_sparse()),
    "without values": every_tensor(lambda tensor: tensor.to("meta")),
    "quantized": every_tensor(
        lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)
    ),
    "text": every_tensor(lambda tensor: "zeros"),
    "one key": lambda state: {
        n: dict(list(s.items())[:1] if len(s) > 1 else [("x", torch.zeros(99))])
        for n, s in state.items()
    },
    "a list": lambda state: {name: [1] for name in state},
}


# The state of other optimizers has other keys and shapes; how a tensor is stored is the same.
FEW_WRONG = ("one row", "more rows", "one key", "a list")
OTHER_OPTIMIZERS = ("sgd", "qhm", "lamb", "timm/adafactor", "timm/kron")


@pytest.mark.trust(11)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [*product(["adamw"], WRONG_STATES), *product(OTHER_OPTIMIZERS, FEW_WRONG)],
)
def test_a_state_of_other_shapes_is_refused_before_it_is_loaded(tmp_path, name, wrong):
    """Compiled code of the optimizer would write beyond the end of the tensors."""
    change = WRONG_STATES[wrong]
    objects, resumed = made(name), made(name)
    run(objects, 0, 2)
    save(tmp_path, objects, TrainState(0, 1, 4, 5, name, step=2), dist=DistInfo(), keep=1)
    file = tmp_path / "step-00000002/state.pt"
    content = torch.load(file, weights_only=True)
    torch.save({**content, "optimizer": change(content["optimizer"])}, file)
    with pytest.raises(CheckpointError, match="state.pt (does not fit|cannot be read)"):
        load(file.parent, resumed)
    states = resumed.optimizer.state.values()  # SGD has a momentum of zeros
    assert not any(value.any() for state in states for value in state.values())


@pytest.mark.trust(11)
@pytest.mark.parametrize("change", [{}, {"momentum_buffer": None}], ids=["nothing", "no momentum"])
def test_a_lost_momentum_of_one_parameter_is_zero(tmp_path, change):
    """torch's SGD of many tensors needs a momentum of all of them, or of none."""
    objects, resumed = made("sgd"), made("sgd")
    run(objects, 0, 2)
    save(tmp_path, objects, TrainState(0, 1, 4, 5, "sgd", step=2), dist=DistInfo(), keep=1)
    file = tmp_path / "step-00000002/state.pt"
    content = torch.load(file, weights_only=True)
    content["optimizer"][next(iter(content["optimizer"]))] = change
    torch.save(content, file)
    load(file.parent, resumed)
    run(resumed, 2, 3)
