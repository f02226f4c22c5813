"""torch.compile traces a model as one graph, also with random shift and other image sizes."""

import pytest
import torch
from torch._dynamo.utils import counters

from vil.layers.attention import TrainStep, set_progress
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


def small(drop_path_rate: float = 0.0, **attention) -> MsViT:
    """Three stages: 12 x 12 and 6 x 6 tokens in windows of 4 and 3, then full attention."""
    arch = "l1,h1,d16,n1,s1,g1,p4,f4,a0_l2,h2,d32,n1,s1,g1,p2,f3,a1_l3,h2,d32,n1,s0,g1,p2,a0"
    torch.manual_seed(0)
    return MsViT(
        parse_arch(arch),
        num_classes=3,
        img_size=48,
        drop_path_rate=drop_path_rate,
        attention_args={"longformer": attention},
    )


def train_compiled(steps: int, sizes: tuple[int, ...] = (48,), **settings) -> int:
    """Train a compiled and a plain model alike. Return how many graphs were compiled."""
    torch.compiler.reset()
    counters.clear()
    plain, compiled = small(**settings), small(**settings)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for step in range(steps):
        for size in sizes:
            images, losses = torch.randn(2, 3, size, size), []
            for model in (plain, compiled):
                set_progress(model, TrainStep(0, step, step // 2, 4, 2))
                torch.manual_seed(step)  # of stochastic depth
                model.zero_grad()
                losses.append(model(images).square().sum())
                losses[-1].backward()
            torch.testing.assert_close(*losses)
            for a, b in zip(plain.parameters(), compiled.parameters()):
                torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)
    return counters["stats"]["unique_graphs"]


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
def test_random_shift_compiles_to_one_graph_for_all_modes():
    assert train_compiled(6, mode=1, drop_path_rate=0.2) == 1


@pytest.mark.long
def test_image_sizes_compile_to_few_graphs():
    assert train_compiled(1, (48, 64, 56, 80, 40, 96)) < 6
