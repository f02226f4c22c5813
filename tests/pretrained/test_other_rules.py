"""Weights of the 2021 code are computed by its rules, which are saved with them."""

import pytest
import torch

import vil
from tests.common.small_runs import FAKE, SMALL, metrics, results, succeeds
from vil.config import get_config
from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.pretrained.load_weights import get_2021_names, load_weights
from vil.pretrained.model_card import build_from_card, make_model_card

pytestmark = [pytest.mark.smoke, pytest.mark.trust(12)]


@pytest.mark.parametrize(
    ("attention", "argument", "value"),
    [("performer", "batch_max", True), ("srformer", "ragged", "drop"), ("longformer", None, None)],
)
def test_a_warning_names_the_rule(attention, argument, value, caplog):
    arch = "l1,h1,d8,n2,s1,g1,p4,f2,a1"

    def model(**own) -> MsViT:
        stages = parse_arch(arch, attention)
        return MsViT(stages, img_size=20, num_classes=3, attention_args={attention: own})

    names = get_2021_names(model())
    state = {names[name]: value for name, value in model().state_dict().items()}
    loaded, x = model().eval(), torch.rand(2, 3, 20, 28)
    load_weights(loaded, state)
    assert len(caplog.records) == (1 if argument else 0)
    assert (f"{attention} {argument}={value}" if argument else "") in caplog.text
    caplog.clear()
    chosen = model(**({argument: value} if argument else {})).eval()
    load_weights(chosen, state)
    assert torch.equal(loaded(x), chosen(x))
    load_weights(model(), model().state_dict())  # vil's names: no warning
    assert not caplog.records

    saved = build_from_card(make_model_card(loaded)).eval()
    load_weights(saved, loaded.state_dict())
    assert torch.equal(saved(x), loaded(x))
    if argument:  # a rule that was chosen stays
        other = {"ragged": "pad"} if argument == "ragged" else {"batch_max": False}
        stays = model(**other).eval()
        load_weights(stays, state)
        assert not caplog.records
        assert stays.settings["attention_args"] == {attention: other}


def test_every_norm_has_the_epsilon_of_the_reference(caplog):
    stages = parse_arch("l1,h1,d8,n2,s1,g1,p4,f2,a1")
    model = MsViT(stages, img_size=20, num_classes=3, norm_eps=1e-5)
    names = get_2021_names(model)
    load_weights(model, {names[name]: value for name, value in model.state_dict().items()})
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-6}
    assert make_model_card(model)["model"]["norm_eps"] == 1e-6
    assert "epsilon 1e-06 of every LayerNorm" in caplog.text


def test_a_run_keeps_the_rules_of_its_initial_weights(tmp_path):
    """Its checkpoints have vil's names; evaluation and resumption compute as training did."""
    words = (*SMALL, *FAKE, "OPTIM.EPOCHS=1", "DATALOADER.WORKERS=0", "INPUT.IMAGE_SIZE=40",
             "MODEL.VIT.MSVIT.ATTN_TYPE=srformer", "MODEL.VIT.MSVIT.LN_EPS=1e-5")  # fmt: skip
    model = vil.build_model(get_config(None, words))
    names = get_2021_names(model)
    state = {names[name]: value for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "old.pth")
    run = tmp_path / "run"
    succeeds("train", "--output_dir", run, *words, f"MODEL.MODEL_PATH={tmp_path / 'old.pth'}")
    kept = get_config(run / "config.yaml").MODEL.VIT.MSVIT
    assert (kept.SR_RAGGED, kept.LN_EPS) == ("drop", 1e-6)
    succeeds("train", "--output_dir", run, "--resume", "OPTIM.EPOCHS=2")
    succeeds("evaluate", "--run", run, "--checkpoint", "last")
    logged = metrics(run, "val")[-1]
    assert abs(results(run)["fake"]["loss"] - logged["loss"]) < 1e-6
