"""Reversible models: same parameters and weights, memory, maps, padding, export, and refusals."""

import pytest
import torch

import vil
from vil.export import export_model, load_exported
from vil.layers.attention import set_progress
from vil.models.arch import parse_arch
from vil.models.stage import store_activations
from vil.models.vision_longformer import MsViT
from vil.utils.train_step import TrainStep

SMALL = "l1,h1,d8,n2,s1,g1,p4,f3,a0_l2,h2,d16,n3,s1,g2,p2,f2,a1_l3,h2,d16,n1,s0,g0,p2,f2,a0"


def small(arch=SMALL, **settings) -> MsViT:
    torch.manual_seed(0)
    settings = {"img_size": 40, "num_classes": 5, "reversible": True} | settings
    return MsViT(parse_arch(arch), **settings)


def step(model, x, stored=False, **valid):
    """Gradients of all parameters; `stored`: by autograd alone."""
    model.zero_grad()
    torch.manual_seed(5)
    if stored:
        with store_activations(model):
            loss = model.forward_intermediates(x, **valid)[0].square().sum()
    else:
        loss = model.forward_intermediates(x, **valid)[0].square().sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, wanted, tolerance=1e-9):
    assert set(found) == set(wanted)
    for name in found:
        assert (found[name] - wanted[name]).norm() <= tolerance * wanted[name].norm(), name


@pytest.mark.parametrize("padded", [False, True])
def test_a_training_step_equals_that_of_stored_activations(padded):
    """Three stages with dropout, drop path and random shift, on an image of odd sides."""
    own = dict(drop_path_rate=0.3, drop_rate=0.1, attn_drop_rate=0.1)
    model = small(**own, attention_args={"longformer": {"mode": 1}}).double().train()
    set_progress(model, TrainStep(seed=3, step=17))
    x = torch.randn(2, 3, 40, 47, dtype=torch.float64)
    valid = {"valid": torch.tensor([[40, 47], [17, 30]])} if padded else {}
    assert_close(step(model, x, **valid), step(model, x, stored=True, **valid))


def test_weights_of_an_ordinary_model_load_and_print_tells_the_difference():
    ordinary, model = small(reversible=False), small()
    model.load_state_dict(ordinary.state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in ordinary.named_parameters()
    ]
    x = torch.randn(1, 3, 40, 40)
    assert not torch.allclose(model.eval()(x), ordinary.eval()(x))  # another function
    assert model.macs((40, 40)) == ordinary.macs((40, 40))
    assert str(model).count("reversible=True") == 3
    assert "reversible" not in str(ordinary)


def test_an_added_block_stores_nothing():
    stored = []
    for blocks in (1, 4):
        model = small(f"l1,h2,d16,n{blocks},s1,g1,p4,f4,a0", drop_path_rate=0.1).train()
        own, sizes = {p.data_ptr() for p in model.parameters()}, {}

        def pack(x, own=own, sizes=sizes):
            if x.data_ptr() not in own:
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = model(torch.randn(2, 3, 40, 40))
        stored.append(sum(sizes.values()))
        out.sum().backward()
    assert stored[0] == stored[1] > 0


def test_frozen_stages_store_nothing_and_get_no_gradient():
    model = small().double().train()
    model.freeze_stages(2)
    x = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    found = step(model, x)
    assert not any(name.startswith(("stages.0", "stages.1")) for name in found)
    assert_close(found, step(model, x, stored=True))
    assert not model.stages[1](torch.randn(1, 8, 10, 10).double())[0].requires_grad


def test_gradient_checkpointing_is_ignored_with_a_warning(caplog):
    model = small(grad_checkpoint=True).double().train()
    x = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    plain = step(small().double().train(), x)
    assert_close(step(model, x), plain)
    model.set_grad_checkpointing()
    assert len(caplog.records) == 2
    assert all("checkpointing is ignored" in record.getMessage() for record in caplog.records)
    model.set_grad_checkpointing(False)
    assert len(caplog.records) == 2


def test_the_setting_is_kept_with_the_weights(tmp_path):
    model, x = small().eval(), torch.randn(1, 3, 40, 40)
    vil.save_pretrained(model, tmp_path)
    again = vil.from_pretrained(tmp_path)
    assert again.stages[0].reversible
    assert torch.equal(again(x), model(x))
    plain = vil.from_pretrained(tmp_path, reversible=False)
    assert not plain.stages[0].reversible
    assert vil.get_model("vil_tiny", reversible=True, num_classes=2).stages[3].reversible


@pytest.mark.long
def test_it_is_compiled_as_one_graph():
    model, x = small("l1,h1,d8,n2,s0,g1,p4,a1").eval(), torch.randn(2, 3, 40, 40)
    with torch.no_grad():
        plain = model(x)
        graph = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.allclose(graph(x), plain, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_file_computes_the_same(suffix, tmp_path):
    model = small("l1,h1,d8,n2,s0,g1,p4,a1").train()
    export_model(model, tmp_path / f"model{suffix}", size=(24, 28), dynamic=["batch"])
    x = torch.randn(3, 3, 24, 28)
    found = load_exported(tmp_path / f"model{suffix}")(x)
    assert torch.allclose(found, model.eval()(x).detach(), atol=1e-4)
