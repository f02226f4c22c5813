"""Small detectors for the tests, with weights that give their outputs some variety."""

import torch
from torch import nn

from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.tasks.detection.models.detectors import DetectorConfig, build_detector
from vil.tasks.detection.models.fpn import strip_head

ARCH = "l1,h1,d32,n1,s1,g1,p4,f4,a{a}_l2,h2,d64,n2,s1,g1,p2,f3,a{a}_l3,h4,d128,n1,s1,g0,p2,f3,a{a}"
SMALL = dict(
    fpn_channels=32,
    anchors_sizes=(16, 32, 64, 128),
    rpn_pre_nms_train=60,
    rpn_pre_nms_test=60,
    rpn_post_nms_train=40,
    rpn_post_nms_test=40,
    rpn_samples=32,
    box_channels=48,
    box_samples=16,
    mask_channels=16,
    mask_layers=1,
    per_image=20,
    test_size=100,
    max_size=160,
    score=0.0,
)


def small_body(
    absolute: int = 0, img_size: int = 160, attention: str = "longformer", **own
) -> MsViT:
    arch = ARCH.format(a=absolute)
    stages = parse_arch(arch.replace("g0", "g1") if attention == "global" else arch, attention)
    return MsViT(stages, img_size=img_size, pos_resize="crop", **own)


def detector(
    kind: str = "mask_rcnn",
    *,
    classes: int = 3,
    absolute: int = 0,
    attention: str = "longformer",
    **own,
) -> nn.Module:
    """Drawn from seed 0; vectors too, so that biases matter."""
    torch.manual_seed(0)
    stages = (2, 3) if kind == "retinanet" else (1, 2, 3)
    settings = DetectorConfig(classes, fpn_stages=stages, **SMALL | own)
    model = build_detector(kind, strip_head(small_body(absolute, attention=attention)), settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def pictures(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(3, *size) for size in sizes]


def target(size: tuple[int, int], *boxes: tuple[float, ...]) -> dict[str, torch.Tensor]:
    """Boxes of categories 1, 2, ... and masks that fill them."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes):
        mask[int(y0) : int(y1), int(x0) : int(x1)] = 1
    labels = torch.arange(1, len(boxes) + 1)
    return {"boxes": torch.tensor(boxes).view(-1, 4).float(), "labels": labels, "masks": masks}
