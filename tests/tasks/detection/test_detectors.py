"""Detectors: an image by itself, losses for every kind of truth, heads of both generations."""

import pytest
import torch
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.rpn import AnchorGenerator

from tests.common.detection.detectors import detector, pictures, small_body, target
from vil.layers.attention import ATTENTIONS
from vil.tasks.detection.models.detectors import DETECTORS, DetectorConfig, build_detector
from vil.tasks.detection.models.fpn import strip_head
from vil.tasks.detection.models.heads import Anchors, Pooler

SIZES = ((64, 96), (131, 70), (90, 120))


def losses(model: torch.nn.Module, *arguments) -> dict[str, float]:
    torch.manual_seed(3)  # samples of anchors and proposals are drawn
    return {name: loss.item() for name, loss in model.train()(*arguments).items()}


CASES = [(kind, absolute, "longformer") for kind in DETECTORS for absolute in (0, 1)]
CASES += [("mask_rcnn", 1, name) for name in ATTENTIONS if name != "longformer"]


@pytest.mark.parametrize(("kind", "absolute", "attention"), CASES)
def test_detections_do_not_depend_on_the_other_images(kind, absolute, attention):
    model = detector(kind, absolute=absolute, attention=attention).eval()
    images = pictures(*SIZES)
    with torch.no_grad():
        together = model(images)
        alone = [model([image])[0] for image in images]
    for mine, theirs in zip(together, alone):
        assert len(mine["boxes"]) > 5
        assert mine.keys() == theirs.keys()
        assert torch.equal(mine["labels"], theirs["labels"])
        for name in mine.keys() - {"labels"}:
            assert torch.allclose(mine[name], theirs[name], atol=1e-4), name


@pytest.mark.defect("B33")
@pytest.mark.parametrize("kind", DETECTORS)
def test_every_parameter_learns(kind):
    model = detector(kind)
    truth = target(SIZES[0], (5, 5, 40, 30), (50, 20, 90, 60))
    sum(model(pictures(SIZES[0]), [truth]).values()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("kind", DETECTORS)
def test_images_without_objects_are_background(kind):
    model = detector(kind)
    found = losses(model, pictures(*SIZES[:2]), [target(SIZES[0]), target(SIZES[1])])
    assert all(torch.isfinite(torch.tensor(list(found.values()))))
    where = "loss_classifier" if kind != "retinanet" else "classification"
    assert found[where] > 0
    boxes = "loss_box_reg" if kind != "retinanet" else "bbox_regression"
    assert found[boxes] == 0


@pytest.mark.parametrize("kind", DETECTORS)
def test_losses_are_means_over_images(kind):
    """Two images of one size: each alone, and both, where nothing is left to chance."""
    model = detector(kind, rpn_samples=10**4, box_samples=10**4, box_positive=1.0)
    images = pictures(SIZES[0], SIZES[0])
    truths = [target(SIZES[0], (5, 5, 40, 30)), target(SIZES[0], (50, 20, 90, 60))]
    both = losses(model, images, truths)
    each = [losses(model, [image], [truth]) for image, truth in zip(images, truths)]
    ours = ("loss_objectness", "loss_rpn_box_reg", "classification", "bbox_regression")
    for name in both.keys() & {*ours}:
        assert both[name] == pytest.approx((each[0][name] + each[1][name]) / 2, rel=1e-4)


@pytest.mark.parametrize("kind", ["mask_rcnn", "faster_rcnn"])
def test_nothing_is_learnt_from_padding(kind):
    """The losses of an image are the same beside a larger one."""
    model = detector(kind, rpn_samples=10**5, box_samples=10**5, box_positive=1.0)
    (image,), truth = pictures(SIZES[0]), target(SIZES[0], (5, 5, 40, 30))
    counts = []
    model.rpn.register_forward_hook(lambda _, args, out: counts.append(out[1]["loss_objectness"]))
    losses(model, [image], [truth])
    losses(model, [image, *pictures((160, 160))], [truth, target((160, 160))])
    assert counts[0].item() == pytest.approx(counts[1].item(), rel=1e-4)


@pytest.mark.parametrize("kind", DETECTORS)
def test_a_box_without_area_and_a_missing_target_are_refused(kind):
    model = detector(kind)
    with pytest.raises(ValueError, match=r"image 1: box \[5.0, 5.0, 5.0, 9.0\] has no area"):
        model(pictures(*SIZES[:2]), [target(SIZES[0]), target(SIZES[1], (5, 5, 5, 9))])
    with pytest.raises(ValueError, match="2 images and 1 targets"):
        model(pictures(*SIZES[:2]), [target(SIZES[0])])
    with pytest.raises(ValueError, match="2 images and no targets"):
        model(pictures(*SIZES[:2]))


@pytest.mark.parametrize("kind", DETECTORS)
def test_losses_are_float32_under_autocast(kind):
    model = detector(kind)
    truth = target(SIZES[0], (5, 5, 40, 30))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(pictures(SIZES[0]), [truth])
    assert {loss.dtype for loss in found.values()} == {torch.float32}
    sum(found.values()).backward()
    exact = losses(detector(kind), pictures(SIZES[0]), [truth])
    where = "classification" if kind == "retinanet" else "loss_objectness"
    assert found[where].item() == pytest.approx(exact[where], rel=0.02)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model.eval()(pictures(SIZES[0]))[0]["boxes"].dtype == torch.float32


@pytest.mark.parametrize("kind", DETECTORS)
def test_the_second_generation_of_heads(kind):
    """Batch norms keep the images of a step together; in evaluation each is by itself again."""
    model = detector(kind, version="v2", fpn_channels=32)
    truth = target(SIZES[0], (5, 5, 40, 30))
    assert all(map(torch.isfinite, model(pictures(*SIZES[:2]), [truth, target(SIZES[1])]).values()))
    count = sum(p.numel() for p in model.parameters())
    assert count > sum(p.numel() for p in detector(kind, fpn_channels=32).parameters())
    images = pictures(*SIZES)
    with torch.no_grad():
        together, alone = model.eval()(images), [model([image])[0] for image in images]
    for mine, theirs in zip(together, alone):
        assert torch.allclose(mine["boxes"], theirs["boxes"], atol=1e-3)


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (16, 16), (33, 17)])
@pytest.mark.parametrize("kind", DETECTORS)
def test_images_of_any_shape(kind, size):
    model = detector(kind).eval()
    with torch.no_grad():
        (found,) = model(pictures(size))
    height, width = size
    assert (found["boxes"] >= 0).all()
    assert (found["boxes"] <= torch.tensor([width, height, width, height]) + 1e-3).all()
    assert all(mask.shape == (1, *size) for mask in found.get("masks", ()))


def test_boxes_are_in_pixels_of_the_input_image():
    """Boxes scale with the image."""
    model = detector("faster_rcnn").eval()
    (image,) = pictures((50, 75))
    with torch.no_grad():
        small = model([image])[0]
        large = model([torch.nn.functional.interpolate(image[None], scale_factor=2)[0]])[0]
    assert large["boxes"].max() > 1.5 * small["boxes"].max()


def test_images_are_downscaled_without_aliasing():
    """Noise is averaged over all pixels that become one, 16 and their neighbours, not over four."""
    transform = detector("retinanet").eval().transform
    (image,) = pictures((400, 400))
    shrunk, _ = transform.resize(image)
    assert shrunk.shape == (3, 100, 100)
    assert 0.03 < shrunk.std() < 0.08


def test_anchors_are_torchvisions_where_its_strides_are_right(caplog):
    ours = Anchors((32, 64), 3, (0.5, 1.0, 2.0), (8, 16))
    assert not caplog.text
    Anchors((4, 64), 3, (0.5, 1.0, 2.0), (8, 16))
    assert "of the 9 anchors of size 4, 6 are different" in caplog.text
    scales = [2 ** (i / 3) for i in range(3)]
    theirs = AnchorGenerator(
        tuple(tuple(side * scale for scale in scales) for side in (32, 64)),
        ((0.5, 1.0, 2.0),) * 2,
    )
    images = type("Images", (), {"tensors": torch.zeros(2, 3, 64, 96), "image_sizes": [1, 2]})
    levels = [torch.zeros(2, 1, 8, 12), torch.zeros(2, 1, 4, 6)]
    for mine, expected in zip(ours(images, levels), theirs(images, levels), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("strides", [(4, 16), (4, 32), (3, 12), (4, 8, 32)], ids=str)
def test_boxes_of_all_sizes_are_pooled(strides):
    """Also from a pyramid without some stages, or of a body whose patches are larger."""
    maps = {
        str(at): torch.full((1, 1, 960 // stride, 960 // stride), at + 1.0)
        for at, stride in enumerate(strides)
    }
    sides = torch.tensor([5.0, 50, 100, 150, 250, 400, 900])
    boxes = torch.stack([0 * sides, 0 * sides, sides, sides], dim=1)
    pooled = Pooler(strides, 7, sampling=2)([maps], [boxes], [(960, 960)]).mean(dim=(1, 2, 3))
    assert torch.equal(pooled, pooled.sort().values)
    assert (pooled[0], pooled[-1]) == (1, len(strides))


def test_the_rcnn_computes_what_torchvisions_does():
    """Weights of ours in its classes, on an image that needs no padding."""
    ours = detector("mask_rcnn", per_image=50).eval()
    theirs = MaskRCNN(
        ours.backbone,
        rpn_anchor_generator=ours.rpn.anchor_generator,
        rpn_head=ours.rpn.head,
        box_head=ours.roi_heads.box_head,
        box_predictor=ours.roi_heads.box_predictor,
        mask_head=ours.roi_heads.mask_head,
        mask_predictor=ours.roi_heads.mask_predictor,
        rpn_pre_nms_top_n_test=60,
        rpn_post_nms_top_n_test=40,
        box_score_thresh=0.0,
        box_detections_per_img=50,
    ).eval()
    theirs.transform = ours.transform
    assert theirs.load_state_dict(ours.state_dict())
    images = pictures((128, 128))
    ours.transform.min_size = (128,)
    for mine, expected in zip(ours(images), theirs(images)):
        for name in expected:
            assert torch.allclose(mine[name].float(), expected[name].float(), atol=1e-4), name
    assert isinstance(theirs, FasterRCNN)


def test_retinanet_finds_no_background():
    """Its head has a column for label 0, which nothing is trained to be."""
    model = detector("retinanet", score=0.0).eval()
    head = model.head.classification_head
    head.cls_logits.bias.data.view(-1, head.num_classes)[:, 0] += 9
    labels = model(pictures((100, 130)))[0]["labels"]
    assert len(labels)
    assert 0 not in labels


@pytest.mark.parametrize("sizes", [(16, 32), (16, 32, 64), (16, 32, 64, 128)], ids=len)
def test_retinanet_has_a_level_for_each_size_of_anchors(sizes):
    model = detector("retinanet", anchors_sizes=sizes).eval()
    levels = model.backbone(torch.rand(1, 3, 128, 128))
    assert [level.shape[-1] for level in levels.values()] == [16, 8, 4, 2][: len(sizes)]
    assert len(model(pictures((100, 130)))[0]["boxes"])


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="need a multiple of 8 channels, got 44"):
        detector("retinanet", version="v2", fpn_channels=44)
    with pytest.raises(ValueError, match="5 anchor sizes for 4 levels"):
        build_detector(
            "mask_rcnn", strip_head(small_body()), DetectorConfig(3, fpn_stages=(1, 2, 3))
        )
    with pytest.raises(ValueError, match="1 anchor sizes for 2 levels"):
        detector("retinanet", anchors_sizes=(16,))
    with pytest.raises(ValueError, match="did you mean 'mask_rcnn'"):
        build_detector("maskrcnn", strip_head(small_body()), DetectorConfig(3))
