"""Every term of the loss: of labeled pixels only, image by image, and equal to its reference."""

import pytest
import torch
import torch.nn.functional as F

from vil.tasks.segmentation import IGNORE
from vil.tasks.segmentation.losses import TERMS, parse_loss

smp = pytest.importorskip("segmentation_models_pytorch").losses
B, K, H, W = 4, 5, 7, 9
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 3 * torch.randn(B, K, H, W, generator=GENERATOR)
TARGETS = torch.randint(IGNORE, K - 1, (B, H, W), generator=GENERATOR)  # without the last class
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0])
SUMS = [*TERMS, "ce + dice:0.5", "lovasz:2 + focal + ce"]


def gradient(loss, logits, targets, scale=1.0):
    """The value of the loss, and its gradient with respect to the logits."""
    logits = logits.clone().requires_grad_()
    value, _ = loss(logits, targets)
    (scale * value).backward()
    return value.detach(), logits.grad


@pytest.mark.parametrize("text", SUMS)
def test_the_loss_of_a_batch_is_the_mean_of_the_losses_of_its_images(text):
    loss = parse_loss(text, num_classes=K)
    value, whole = gradient(loss, LOGITS, TARGETS)
    singles = [gradient(loss, LOGITS[[n]], TARGETS[[n]], 1 / B) for n in range(B)]
    torch.testing.assert_close(value, sum(single for single, _ in singles) / B)
    torch.testing.assert_close(whole, torch.cat([part for _, part in singles]))
    halves = [gradient(loss, LOGITS[n : n + 2], TARGETS[n : n + 2], 0.5) for n in (0, 2)]
    torch.testing.assert_close(value, sum(half for half, _ in halves) / 2)
    torch.testing.assert_close(whole, torch.cat([part for _, part in halves]))


@pytest.mark.parametrize("options", [{}, {"hard_pixels": 0.3}, {"class_weights": WEIGHTS}], ids=str)
@pytest.mark.parametrize("name", TERMS)
def test_only_labeled_pixels_count(name, options):
    loss = parse_loss(f"ce + {name}" if name != "ce" else "ce", num_classes=K, **options)
    value, grad = gradient(loss, LOGITS, TARGETS)
    labeled = TARGETS != IGNORE
    other = torch.where(labeled[:, None], LOGITS, torch.randn_like(LOGITS))
    assert loss(other, TARGETS)[0] == value
    assert not grad.permute(0, 2, 3, 1)[~labeled].any()
    for logits, target, keep in zip(LOGITS, TARGETS, labeled):  # the same pixels as an image
        kept = logits[:, keep][None, :, None], target[keep][None, None]
        torch.testing.assert_close(loss(*kept)[0], loss(logits[None], target[None])[0])


@pytest.mark.parametrize("options", [{}, {"hard_pixels": 0.3}, {"class_weights": WEIGHTS}], ids=str)
@pytest.mark.parametrize("name", TERMS)
def test_an_image_without_labels_contributes_zero(name, options):
    loss = parse_loss(f"{name}:2 + ce" if name != "ce" else "ce", num_classes=K, **options)
    value, grad = gradient(loss, LOGITS[:1], torch.full_like(TARGETS[:1], IGNORE))
    assert value == 0
    assert not grad.any()  # and no NaN
    targets = TARGETS.clone()
    targets[1] = IGNORE
    value, grad = gradient(loss, LOGITS, targets)
    rest = [0, 2, 3]
    torch.testing.assert_close(value, loss(LOGITS[rest], TARGETS[rest])[0] * 3 / B)
    assert grad.isfinite().all()
    assert not grad[1].any()


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weights"])
def test_cross_entropy_is_that_of_torch(weights):
    loss = parse_loss("ce", num_classes=K, class_weights=weights)
    logits = LOGITS.clone().requires_grad_()
    options = dict(weight=weights, ignore_index=IGNORE)
    images = [F.cross_entropy(x[None], y[None], **options) for x, y in zip(logits, TARGETS)]
    expected = torch.stack(images).mean()
    expected.backward()
    value, grad = gradient(loss, LOGITS, TARGETS)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grad, logits.grad)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weights"])
@pytest.mark.parametrize("share", [1e-6, 0.25, 0.999])
def test_hard_pixels_are_those_with_the_largest_cross_entropy(share, weights):
    loss = parse_loss("ce", num_classes=K, class_weights=weights, hard_pixels=share)
    expected = []
    for logits, target in zip(LOGITS, TARGETS):
        x, y = logits[:, target != IGNORE].T, target[target != IGNORE]
        losses = F.cross_entropy(x, y, reduction="none")
        hard = losses.topk(max(round(share * len(y)), 1)).indices
        # zero if the only hard pixel has the weight 0, for which torch divides by 0
        expected.append(F.cross_entropy(x[hard], y[hard], weight=weights).nan_to_num(0))
    torch.testing.assert_close(loss(LOGITS, TARGETS)[0], torch.stack(expected).mean())


REFERENCES = {
    "dice": smp.DiceLoss("multiclass"),
    "focal": smp.FocalLoss("multiclass"),
    "lovasz": smp.LovaszLoss("multiclass"),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_other_terms_are_those_of_smp_on_the_labeled_pixels(name):
    images = []
    for logits, target in zip(LOGITS, TARGETS):
        keep = target != IGNORE
        images.append(REFERENCES[name](logits[:, keep][None, :, None], target[keep][None, None]))
    value = parse_loss(name, num_classes=K)(LOGITS, TARGETS)[0]
    torch.testing.assert_close(value, torch.stack(images).mean())


def test_a_sum_has_the_weights_of_its_terms():
    value, terms = parse_loss("ce:0.5+dice + lovasz: 2", num_classes=K)(LOGITS, TARGETS)
    assert list(terms) == ["ce", "dice", "lovasz"]
    torch.testing.assert_close(value, 0.5 * terms["ce"] + terms["dice"] + 2 * terms["lovasz"])
    for name, term in terms.items():
        assert term == parse_loss(name, num_classes=K)(LOGITS, TARGETS)[0]


@pytest.mark.parametrize("name", TERMS)
def test_low_precision_logits_give_a_loss_in_float32(name):
    loss, low = parse_loss(name, num_classes=K), LOGITS.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        value, grad = gradient(loss, low, TARGETS.to(torch.int16))
    assert value.dtype == torch.float32
    assert value == loss(low.float(), TARGETS)[0]
    assert grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("ce + dicee", {}, "did you mean 'dice'"),
        ("", {}, "choices: ce, dice, focal, lovasz"),
        ("ce +", {}, "choices"),
        ("ce:much", {}, "'much'"),
        ("ce:0", {}, "above 0"),
        ("ce:nan", {}, "above 0"),
        ("ce + ce:2", {}, "twice"),
        ("dice", {"class_weights": WEIGHTS}, "LOSS.CLASS_WEIGHTS needs the term ce"),
        ("dice", {"hard_pixels": 0.5}, "SEGMENTATION.HARD_PIXELS needs the term ce"),
        ("ce", {"class_weights": WEIGHTS[:3]}, "3 class weights for 5 classes"),
    ],
)
def test_invalid_losses_are_named(text, options, words):
    with pytest.raises(ValueError, match=words):
        parse_loss(text, num_classes=K, **options)
