"""Every loss of the table against its formula, with classes, smoothed classes and soft targets."""

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import sigmoid_focal_loss

from tests.common.class_task import ClassificationTask
from tests.common.toy_engine import CPU, samples, toy_model
from vil.tasks.image.losses import LOSSES, build_loss

pytestmark = pytest.mark.smoke

B, K = 7, 5
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 3 * torch.randn(B, K, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(K, (B,), generator=GENERATOR)
SOFT = torch.rand(B, K, generator=GENERATOR, dtype=torch.float64).softmax(dim=-1)


def of_classes(smoothing):
    return torch.full((B, K), smoothing / K).double() + (1 - smoothing) * torch.eye(K)[CLASSES]


def yes_or_no(t):
    """-log of what each class is given, (B, K)."""
    p = LOGITS.sigmoid()
    return -(t * p.log() + (1 - t) * (1 - p).log())


def missed(t):
    p = LOGITS.sigmoid()
    return 1 - (t * p + (1 - t) * (1 - p))


FORMULAS = {
    "xentropy": lambda t: -(t * LOGITS.log_softmax(dim=-1)).sum() / B,
    "bce": lambda t: yes_or_no(t).sum() / (B * K),
    "sigmoid": lambda t: yes_or_no(t).sum() / B,
    "focal": lambda t: (missed(t) ** 0.5 * yes_or_no(t)).sum() / B,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_loss_is_its_formula(name, smoothing):
    loss, formula = build_loss(name), FORMULAS[name]
    expected = formula(of_classes(smoothing)).item()
    assert loss(LOGITS, CLASSES, smoothing).item() == pytest.approx(expected, rel=1e-6)
    expected = formula(SOFT).item()  # soft targets are not smoothed again
    assert loss(LOGITS, SOFT, smoothing).item() == pytest.approx(expected, rel=1e-12)
    single = loss(LOGITS[:1, :1], torch.zeros(1, dtype=torch.int64), smoothing)
    assert single.shape == ()


@pytest.mark.parametrize("name", LOSSES)
def test_low_precision_logits_are_judged_in_float32(name):
    low = LOGITS.bfloat16()
    loss = build_loss(name)(low, CLASSES, 0.1)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, build_loss(name)(low.float(), CLASSES, 0.1))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_is_torchvisions_where_they_agree(gamma):
    targets = of_classes(0.0)
    theirs = sigmoid_focal_loss(LOGITS, targets, alpha=-1, gamma=gamma, reduction="mean")
    ours = build_loss("focal", gamma=gamma, normalize=False)(LOGITS, CLASSES)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    theirs = sigmoid_focal_loss(LOGITS, targets, alpha=0.25, gamma=gamma, reduction="sum") / B
    ours = build_loss("focal", alpha=0.25 / 0.75, gamma=gamma)(LOGITS, CLASSES)
    assert 0.75 * ours.item() == pytest.approx(theirs.item(), rel=1e-9)


def test_focal_has_a_gradient_where_the_answer_is_sure():
    """With gamma below 1 the power has an infinite slope at p_t = 1."""
    logits = torch.tensor([[90.0, -90.0, 40.0, -40.0]], requires_grad=True)
    above = torch.tensor([[1.0 + 1e-7, 0.0, 1.0, 0.0]])  # as mixing two equal classes rounds
    for targets in (torch.tensor([0]), above):
        loss = build_loss("focal", gamma=0.5)(logits, targets)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert gradient.isfinite().all()


def test_names_that_are_no_loss_are_refused_with_the_choices():
    for name in ("multisoftmax", "mse"):
        with pytest.raises(ValueError, match="single-label.*xentropy, bce, sigmoid, focal"):
            build_loss(name)
    with pytest.raises(ValueError, match="did you mean 'focal'"):
        build_loss("focl")


@pytest.mark.parametrize("name", LOSSES)
def test_the_task_trains_with_it_and_evaluates_with_cross_entropy(name):
    data, model = samples(6), toy_model()
    loss = build_loss(name)
    task = ClassificationTask(
        device=CPU, test_sets={"a": [data]}, num_classes=7, loss=loss, label_smoothing=0.1
    )
    logits = model(data.images)
    trained = task.loss(model, task.prepare(data)).value
    assert trained.item() == loss(logits, data.targets, 0.1).item()
    evaluated = task.evaluate(model)["a"]["loss"]
    assert evaluated == pytest.approx(F.cross_entropy(logits, data.targets).item(), rel=1e-12)
