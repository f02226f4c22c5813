"""Training transforms: boxes and masks stay with the pixels that they are about."""

import pytest
import torch
from torch import Tensor

from vil.tasks.detection.data.transforms import PADDING, train_transform

pytestmark = pytest.mark.smoke

SIZES = [(1, 1), (7, 31), (40, 30), (33, 33)]  # height, width


def painted(height, width, count=6, seed=0):
    """Return a black image with bright rectangles; the objects are their visible parts."""
    random = torch.Generator().manual_seed(seed)
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    boxes = []
    for number in range(count):
        x1, y1 = (int(torch.randint(side, (), generator=random)) for side in (width, height))
        x2 = int(torch.randint(x1 + 1, width + 1, (), generator=random))
        y2 = int(torch.randint(y1 + 1, height + 1, (), generator=random))
        masks[:, y1:y2, x1:x2] = 0
        masks[number, y1:y2, x1:x2] = 1
        image[:, y1:y2, x1:x2] = 255
        boxes.append([x1, y1, x2, y2])
    target = {"boxes": torch.tensor(boxes).float(), "labels": torch.arange(1, count + 1)}
    return image, {**target, "masks": masks, "image_id": 9}


def hold(image, target, slack):
    """Check what must hold for any target and its image."""
    height, width = image.shape[-2:]
    boxes, masks = target["boxes"], target["masks"]
    assert type(image) is type(boxes) is type(masks) is type(target["labels"]) is Tensor
    assert (image.dtype, masks.dtype, boxes.dtype) == (torch.uint8, torch.uint8, torch.float32)
    assert masks.shape == (len(boxes), height, width)
    assert boxes.shape == (len(target["labels"]), 4)
    assert target["image_id"] == 9
    assert (boxes >= 0).all()
    assert (boxes[:, 2:] <= torch.tensor([width, height])).all()
    assert (boxes[:, 2:] - boxes[:, :2] >= 1).all()
    for (x1, y1, x2, y2), mask in zip(boxes.tolist(), masks):
        rows, columns = mask.nonzero().T
        if len(rows):
            assert x1 - slack <= columns.min()
            assert columns.max() + 1 <= x2 + slack
            assert y1 - slack <= rows.min()
            assert rows.max() + 1 <= y2 + slack
    inside = masks.bool().any(dim=0)
    if inside.any():  # what is a mask's is bright
        assert image[:, inside].float().mean() > (120 if slack else 200)


@pytest.mark.parametrize("size", [(2, 2), *SIZES[1:]], ids=str)
@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1, 3])
def test_resizing_and_flipping(size, flip, scale):
    image, target = painted(*size)
    short = scale * min(size)
    transform = train_transform(sizes=[short], max_size=1000, flip=flip)
    new_image, new = transform(image, target)
    hold(new_image, new, slack=0)
    assert new_image.shape[-2:] == tuple(scale * side for side in size)
    boxes = target["boxes"]
    if flip:
        boxes = torch.stack(
            [size[1] - boxes[:, 2], boxes[:, 1], size[1] - boxes[:, 0], boxes[:, 3]]
        )
        boxes = boxes.T
    assert torch.allclose(new["boxes"], scale * boxes)
    assert new["labels"].tolist() == target["labels"].tolist()
    assert torch.equal(new["masks"].sum(dim=(1, 2)), scale**2 * target["masks"].sum(dim=(1, 2)))


def test_the_shorter_side_is_drawn_and_the_longer_bounded():
    image, target = painted(30, 40)
    transform = train_transform(sizes=[15, 24, 60], max_size=60, flip=0.5)
    shapes = set()
    for seed in range(40):
        torch.manual_seed(seed)
        new_image, new = transform(image, target)
        hold(new_image, new, slack=1)
        shapes.add(tuple(new_image.shape[-2:]))
    assert shapes == {(15, 20), (24, 32), (45, 60)}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_large_scale_jitter(size):
    image, target = painted(*size)
    transform = train_transform(sizes=[5], max_size=37, flip=0.5, jitter=[0.2, 2.5])
    counts = set()
    for seed in range(60):
        torch.manual_seed(seed)
        new_image, new = transform(image, target)
        assert new_image.shape == (3, 37, 37)
        hold(new_image, new, slack=1)
        assert new["masks"].bool().flatten(1).any(dim=1).all()
        counts.add(len(new["boxes"]))
    assert size == (1, 1) or len(counts) > 1  # objects are cropped away


def test_what_jitter_pads_is_nothing():
    image, target = painted(20, 30, count=1)
    torch.manual_seed(0)
    image, target = train_transform(sizes=[1], max_size=40, flip=0, jitter=[0.3, 0.3])(
        image, target
    )
    corner = torch.tensor(PADDING, dtype=torch.uint8)
    padded = (image == corner[:, None, None]).all(dim=0)
    assert padded.sum() >= 40 * 40 - 8 * 12
    assert not (target["masks"].bool().any(dim=0) & padded).any()


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("jitter", [[], [0.1, 2.0]])
def test_an_image_without_boxes(masks, jitter):
    image, target = painted(20, 11, count=0)
    target["boxes"] = target["boxes"].reshape(0, 4)
    if not masks:
        del target["masks"]
    new_image, new = train_transform(sizes=[8], max_size=40, jitter=jitter)(image, target)
    assert new["boxes"].shape == (0, 4)
    assert ("masks" in new) == masks
    if masks:
        assert new["masks"].shape == (0, *new_image.shape[-2:])


@pytest.mark.parametrize("jitter", [[], [0.01, 0.02]])
def test_an_image_with_an_extreme_aspect_ratio(jitter):
    """2 x 3000: its shorter side would shrink to less than a pixel."""
    image, target = painted(2, 3000, count=2)
    transform = train_transform(sizes=[8], max_size=50, flip=1.0, jitter=jitter)
    new_image, new = transform(image, target)
    assert new_image.shape[-2:] == ((50, 50) if jitter else (2, 50))
    hold(new_image, new, slack=1)


def test_the_targets_of_the_dataset_are_not_changed():
    image, target = painted(20, 30)
    before = {key: value.clone() for key, value in target.items() if key != "image_id"}
    train_transform(sizes=[50], max_size=90, flip=1.0)(image, target)
    assert all(torch.equal(target[key], value) for key, value in before.items())
