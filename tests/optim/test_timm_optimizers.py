"""Every optimizer of timm trains, resumes bit for bit, or is refused with a reason."""

import pytest
import torch
from torch import nn

from vil.config import get_config
from vil.engine.checkpoint.save_load import TrainObjects, TrainState, load, save
from vil.engine.distributed import DistInfo
from vil.engine.loop import seed_step, set_lr
from vil.optim import OPTIMIZERS, build_optimizer, decay_groups
from vil.utils.errors import ConfigError

ENTRIES = {n: e for n, e in OPTIMIZERS.all_entries().items() if n.startswith("timm/")}
REFUSED = {name for name, entry in ENTRIES.items() if "refused" in entry.facts}
USABLE = sorted(ENTRIES.keys() - REFUSED)
PEAK = 0.01


def small_model():
    """Parameters of every kind: convolution, matrices, vectors, and a table without decay."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(),
        nn.Linear(16, 20),
    )  # fmt: skip
    model[4].table = nn.Parameter(torch.randn(8, 16))
    return model


def objects_for(name, **settings):
    model = small_model()
    no_decay = {name for name, p in model.named_parameters() if p.ndim < 2 or "table" in name}
    layers = {name: int(name[0]) for name, _ in model.named_parameters()}
    named, options = model.named_parameters(), dict(layers=layers, layer_decay=0.9)
    groups = decay_groups(named, 0.05, 0.0, no_decay, **options)
    optimizer = build_optimizer(name, groups, lr=PEAK, **settings)
    return TrainObjects(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))


def run_steps(objects, start, stop):
    model, optimizer = objects.model, objects.optimizer
    for step in range(start, stop):
        seed_step(0, step, 0)
        set_lr(optimizer, PEAK / (1 + step))
        optimizer.zero_grad()
        outputs = model(torch.randn(4, 3, 2, 2)) + model[4].table.square().mean()
        outputs[:, :10].square().mean().backward()
        optimizer.step()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:It is highly recommended")
@pytest.mark.parametrize("name", USABLE)
def test_a_resumed_run_is_bit_identical(name, tmp_path):
    objects = objects_for(name)
    initial = {k: v.clone() for k, v in objects.model.state_dict().items()}
    run_steps(objects, 0, 3)
    state = TrainState(0, 1, 4, 3, name, step=3)
    checkpoint = save(tmp_path, objects, state, dist=DistInfo(), keep=1)
    run_steps(objects, 3, 6)
    resumed = objects_for(name)
    torch.randn(3)  # other draws before the resumed steps
    assert load(checkpoint, resumed, say=pytest.fail) == state
    run_steps(resumed, 3, 6)
    for key, value in objects.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[key]), key
        assert value.isfinite().all(), key
        assert not torch.equal(value, initial[key]), key


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_optimizer_says_why(name):
    with pytest.raises(ValueError, match=f"does not support the optimizer {name}: it needs"):
        objects_for(name)


def test_settings_reach_the_class_unless_they_are_at_vils_defaults(caplog):
    def group(name, **settings):
        return objects_for(name, **settings).optimizer.param_groups[0]

    assert group("timm/lion")["betas"] == (0.9, 0.99)
    assert group("timm/lion", betas=(0.8, 0.999))["betas"] == (0.8, 0.99)
    assert group("timm/nadamw", betas=(0.8, 0.95), eps=1e-6)["betas"] == (0.8, 0.95)
    assert group("timm/nadamw", betas=(0.8, 0.95), eps=1e-6)["eps"] == 1e-6
    assert not caplog.records
    assert group("timm/adan", betas=(0.8, 0.95))["betas"] == group("timm/adan")["betas"]
    assert "timm/adan has 3 betas and uses their defaults, so OPTIM.ADAM.BETA1 and" in caplog.text
    assert len(caplog.records) == 1
    assert group("timm/sgdw", momentum=0.5)["momentum"] == 0.5
    assert group("timm/adafactor", betas=(0.8, 0.999))["beta1"] == 0.8
    assert group("timm/adafactor")["beta1"] is None


def test_the_learning_rate_of_a_layer_is_scaled():
    optimizer = objects_for("timm/nadamw").optimizer
    set_lr(optimizer, 1.0)
    assert {round(group["lr"], 6) for group in optimizer.param_groups} == {
        round(0.9**n, 6) for n in (0, 1, 2, 3, 5)
    }


@pytest.mark.parametrize(
    ("name", "near"),
    [("timm/nadmw", "timm/nadamw"), ("adamww", "adamw"), ("timm/LION", "timm/lion")],
)
def test_a_wrong_name_suggests_the_nearest(name, near):
    with pytest.raises(ConfigError, match=f"timm/NAME, got '{name}'; did you mean {near}\\?"):
        get_config(None, ["OPTIM.OPT", name])
    get_config(None, ["OPTIM.OPT", near])


def test_sharding_is_for_elementwise_updates():
    sharded = {name.removeprefix("timm/") for name, e in ENTRIES.items() if e.facts["can_shard"]}
    assert {"nadamw", "lion", "adan", "sgdw", "adopt", "radam"} <= sharded
    assert not sharded & {"muon", "lamb", "lars", "adafactor", "mars", "adamp", "cadamw", "bnblion"}
