"""torch.compile traces a model as one graph, with the backends that were tuned for it."""

import pytest
import torch

from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.ops import BACKENDS, dispatch
from vil.ops.dispatch import CHOICES


@pytest.fixture
def tuned(monkeypatch):
    """Tune cases to chunk_autograd and blocked alternately. Yields the backends in use."""
    used = []

    def tune_alternately(case):
        if case.bucket() not in CHOICES:
            CHOICES[case.bucket()] = ("chunk_autograd", "blocked")[len(CHOICES) % 2]
            used.append(CHOICES[case.bucket()])

    original = dispatch.tuned
    monkeypatch.setattr(dispatch, "tuned", lambda case: tune_alternately(case) or original(case))
    yield used
    CHOICES.clear()
    assert set(used) <= set(BACKENDS)


def small():
    """Three stages: 12 x 12 and 6 x 6 tokens in windows of 4 and 3, then full attention."""
    arch = "l1,h1,d16,n1,s1,g1,p4,f4,a0_l2,h2,d32,n1,s1,g1,p2,f3,a1_l3,h2,d32,n1,s0,g1,p2,a0"
    return MsViT(parse_arch(arch), num_classes=3, img_size=48)


@pytest.mark.long
def test_a_tuned_model_compiles_to_one_graph_with_equal_results(tuned, monkeypatch):
    torch.manual_seed(0)
    model, images = small(), torch.randn(2, 3, 48, 48)
    plain = model(images)
    assert set(tuned) == {"chunk_autograd", "blocked"}
    monkeypatch.undo()  # the tuned choices stay; the compiled model uses nothing else
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(images)
    assert torch.equal(plain, compiled)
    weights = list(model.parameters())
    pairs = [torch.autograd.grad(x.square().sum(), weights) for x in (plain, compiled)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*pairs))


@pytest.mark.long
def test_an_untuned_model_compiles_to_one_graph():
    model, images = small().eval(), torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        plain = model(images)
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(images), plain)
