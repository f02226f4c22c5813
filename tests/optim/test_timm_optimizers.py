"""Every optimizer of timm takes vil's settings, or is refused with a reason. That they resume bit
for bit is asserted in tests/engine/test_optimizer_state.py."""

import pytest

from tests.engine.test_optimizer_state import ENTRIES, TIMM, made
from vil.config import get_config
from vil.engine.loop import set_lr
from vil.utils.errors import ConfigError


@pytest.mark.parametrize("name", sorted(ENTRIES.keys() - TIMM))
def test_a_refused_optimizer_says_why(name):
    with pytest.raises(ValueError, match=f"does not support the optimizer {name}: it needs"):
        made(name)


def test_settings_reach_the_class_unless_they_are_at_vils_defaults(caplog):
    def group(name, **settings):
        return made(name, **settings).optimizer.param_groups[0]

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
    optimizer = made("timm/nadamw", 0.9).optimizer
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
