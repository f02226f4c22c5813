"""Whatever an annotation file holds, detectors train on what is left of it with finite losses."""

import pytest
import torch
from torch import nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from tests.common.detection.coco_files import BROKEN, IMAGES, SEGMENTATIONS, box, runs, write
from vil.data.loader import TrainLoader
from vil.tasks.detection.data.datasets import CocoDataset
from vil.tasks.detection.data.transforms import train_transform

CHAINS = {
    "sizes": train_transform(sizes=[48, 64], max_size=96),
    "jitter": train_transform(sizes=[1], max_size=64, jitter=[0.1, 2.0]),
}


def detector(name):
    """A small one for the two categories, of torchvision's own parts."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.ReLU())
    backbone.out_channels = 16
    common = dict(num_classes=3, min_size=64, max_size=96)
    anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    if name == "retinanet":
        return RetinaNet(backbone, anchor_generator=anchors, **common)
    box_pool, mask_pool = (MultiScaleRoIAlign(["0"], size, 2) for size in (7, 14))
    pools = dict(box_roi_pool=box_pool, mask_roi_pool=mask_pool)
    return MaskRCNN(backbone, rpn_anchor_generator=anchors, **pools, **common)


def everything():
    """Each broken annotation beside good ones, a pixel, a crowd, and an image without any."""
    rows = [row for row, _ in BROKEN.values()]
    rows += [box(1, segmentation=segmentation) for segmentation, _ in SEGMENTATIONS.values()]
    rows += [box(1, bbox=(39, 29, 1, 1)), box(1, image=2, iscrowd=1, segmentation=runs(33, 21))]
    rows += [box(1, image=2, bbox=(-5, -5, 99, 99)), box(1, image=3, bbox=(16, 16, 1, 1))]
    return rows


@pytest.mark.long
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["mask_rcnn", "retinanet"])
def test_losses_are_finite(name, chain, tmp_path):
    folder, file = write(tmp_path, everything())
    masks = name == "mask_rcnn"
    dataset = CocoDataset(folder, file, "train", CHAINS[chain], masks=masks, keep_empty=True)
    assert len(dataset) == len(IMAGES)
    unusable = sum(not usable for _, usable in SEGMENTATIONS.values())
    assert len(dataset.dropped) == len(BROKEN) + masks * unusable
    model = detector(name)
    boxes = 0
    for batch in TrainLoader(dataset, batch_size=2, workers=0).batches(0, 6):
        batch = batch.to("cpu")
        boxes += sum(len(target["boxes"]) for target in batch.targets)
        losses = model(batch.images, batch.targets)
        assert all(loss.isfinite() for loss in losses.values()), losses
        sum(losses.values()).backward()
    assert boxes > 10
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
