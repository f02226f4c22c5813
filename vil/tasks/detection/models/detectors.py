"""torchvision's detectors on our backbone: from images of any sizes to losses or detections.

After the pyramid every image is by itself: heads see its own maps, cut to its real cells. So what
is found in an image does not depend on the sizes of the others in its batch.

Letters: B images, n objects of an image, K categories.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.transforms.v2.functional import resize

from vil.layers.padding import downsample_valid
from vil.tasks.detection.models import heads
from vil.tasks.detection.models.anchors import Anchors
from vil.tasks.detection.models.fpn import Backbone
from vil.utils.lookup import lookup

RPN_IOU = (0.7, 0.3)  # an anchor is an object from the first on, and background below the second
RPN_POSITIVE, RPN_NMS = 0.5, 0.7
BOX_IOU = 0.5
DENSE_IOU = (0.5, 0.4)

BODY = "backbone.body."  # in names of parameters
Targets = list[dict[str, Tensor]]


class Transform(GeneralizedRCNNTransform):
    """Normalises, and pads a batch to one size; resizes in evaluation only, without aliasing.
    In training the images come resized, together with their boxes and masks."""

    def resize(
        self, image: Tensor, target: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        if self.training:
            return image, target
        height, width = image.shape[-2:]
        factor = min(self.min_size[-1] / min(height, width), self.max_size / max(height, width))
        size = [max(1, round(height * factor)), max(1, round(width * factor))]
        return resize(image, size, antialias=True), target


class PerImageDetector:
    """What both kinds of detector do with a batch: each image is detected by itself."""

    @property
    def attention_body(self) -> nn.Module:
        """The network with the attention; it sees images of many sizes, padded to one."""
        return self.backbone.body

    def compile(self, **options) -> None:
        """Compile the backbone; what follows depends on what is found."""
        self.backbone.compile(dynamic=True, **options)

    def preprocess(
        self, images: Sequence[Tensor], targets: Targets | None
    ) -> tuple[list[ImageList], list[dict[str, Tensor]], Targets | None]:
        """Each image as a list of its own, its levels without padding, and the targets.

        Raises ValueError in training for images without targets, and for boxes without area.
        """
        if self.training:
            check_targets(images, targets)
        batch, targets = self.transform(list(images), targets)
        sizes = torch.tensor(batch.image_sizes, device=batch.tensors.device)
        levels = own_levels(self.backbone(batch.tensors, sizes), sizes, self.backbone.strides)
        single = [ImageList(x[None], [size]) for x, size in zip(batch.tensors, batch.image_sizes)]
        return single, levels, targets

    @property
    def num_layers(self) -> int:
        """The depth of the pyramid and the heads."""
        return self.backbone.body.num_layers

    def layer_of(self, name: str) -> int:
        """The depth of a parameter, for learning rates that decay with it."""
        inner = name.removeprefix(BODY)
        return self.num_layers if inner == name else self.backbone.body.layer_of(inner)

    def no_weight_decay(self) -> set[str]:
        """What the body does not decay; of all else vectors are not."""
        return {BODY + name for name in self.backbone.body.no_weight_decay()}

    def to_input_pixels(
        self, found: list[dict[str, Tensor]], single: list[ImageList], images: Sequence[Tensor]
    ) -> list[dict[str, Tensor]]:
        """Detections in the pixels of the images as they came."""
        shown = [one.image_sizes[0] for one in single]
        return self.transform.postprocess(found, shown, [tuple(x.shape[-2:]) for x in images])


class RCNN(PerImageDetector, GeneralizedRCNN):
    """Faster or Mask R-CNN. As torchvision's: `model(images, targets)` in training -> losses;
    `model(images)` in evaluation -> a dict of `boxes` (n, 4), `labels` (n,), `scores` (n,) and
    `masks` (n, 1, H, W) for each image. Images (3, H, W) in 0..1; labels from 1 to K."""

    def get_classifier(self) -> list[nn.Module]:
        """What has a row per category."""
        roi = self.roi_heads
        masks = [roi.mask_predictor.mask_fcn_logits] if roi.has_mask() else []
        return [roi.box_predictor.cls_score, roi.box_predictor.bbox_pred, *masks]

    def forward(
        self, images: Sequence[Tensor], targets: Targets | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        single, levels, targets = self.preprocess(images, targets)
        each = targets or [None] * len(single)
        proposed = [self.rpn(s, f, t and [t]) for s, f, t in zip(single, levels, each)]
        boxes = [found for (found,), _ in proposed]
        sizes = [one.image_sizes[0] for one in single]
        found, losses = self.roi_heads(levels, boxes, sizes, targets)
        if self.training:
            return losses | mean([losses for _, losses in proposed])
        return self.to_input_pixels(found, single, images)


class RetinaNetDetector(PerImageDetector, RetinaNet):
    """RetinaNet, called like `RCNN`; detections have no masks."""

    def get_classifier(self) -> list[nn.Module]:
        """What has a row per category."""
        return [self.head.classification_head.cls_logits]

    def forward(
        self, images: Sequence[Tensor], targets: Targets | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        single, levels, targets = self.preprocess(images, targets)
        outputs = [self.head(list(maps.values())) for maps in levels]
        anchors = [
            self.anchor_generator(one, list(maps.values())) for one, maps in zip(single, levels)
        ]
        if self.training:
            return mean([
                self.compute_loss([target], output, boxes)
                for target, output, boxes in zip(targets, outputs, anchors)
            ])  # fmt: skip
        per_cell = self.anchor_generator.num_anchors_per_location()[0]
        found = []
        for one, maps, output, boxes in zip(single, levels, outputs, anchors):
            counts = [level[0, 0].numel() * per_cell for level in maps.values()]
            output["cls_logits"] = without_background(output["cls_logits"])
            split = {name: list(x.split(counts, dim=1)) for name, x in output.items()}
            by_level = [list(box.split(counts)) for box in boxes]
            found += self.postprocess_detections(split, by_level, one.image_sizes)
        return self.to_input_pixels(found, single, images)


def without_background(logits: Tensor) -> Tensor:
    """(1, anchors, 1 + K), the first column of which torchvision would report as label 0."""
    return F.pad(logits[..., 1:], (1, 0), value=-torch.inf)


def own_levels(
    levels: dict[str, Tensor], sizes: Tensor, strides: Sequence[int]
) -> list[dict[str, Tensor]]:
    """Levels (B, C, X, Y) of a padded batch -> those of each image, (1, C, x, y), cut to its real
    cells. sizes (B, 2): height and width in pixels."""
    real = torch.stack([downsample_valid(sizes, stride) for stride in strides], dim=1).tolist()
    each = [level.split(1) for level in levels.values()]  # whose gradients meet in one operation
    return [
        {name: level[:, :, :rows, :cols] for name, level, (rows, cols) in zip(levels, image, cells)}
        for image, cells in zip(zip(*each), real)
    ]


def mean(losses: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Each loss as a mean over the images."""
    return {name: torch.stack([one[name] for one in losses]).mean() for name in losses[0]}


def check_targets(images: Sequence[Tensor], targets: Targets | None) -> None:
    if targets is None or len(targets) != len(images):
        given = "no" if targets is None else len(targets)
        raise ValueError(f"in training each image has a target: {len(images)} and {given} given")
    for number, target in enumerate(targets):
        boxes = target["boxes"]
        flat = ~(boxes[:, 2:] > boxes[:, :2]).all(dim=1)
        if flat.any():
            raise ValueError(f"image {number}: box {boxes[flat][0].tolist()} has no area")


@dataclass(frozen=True)
class DetectorConfig:
    """What a detector is made of; pairs are for training and evaluation. Defaults: Mask R-CNN's on
    COCO."""

    classes: int  # K, without the background
    version: str = "v1"  # of the heads: v1, v2
    stages: Sequence[int] = (1, 2, 3, 4)  # of the body, whose maps enter the pyramid
    channels: int = 256  # of each level of the pyramid
    norm: bool = False  # a LayerNorm on each stage's map
    anchor_sizes: Sequence[float] = (32, 64, 128, 256, 512)  # pixels, one for each level
    anchor_octaves: int = 1
    anchor_ratios: Sequence[float] = (0.5, 1.0, 2.0)
    pre_nms: tuple[int, int] = (2000, 1000)  # proposals of a level before suppression
    post_nms: tuple[int, int] = (1000, 1000)  # proposals of an image after it
    rpn_samples: int = 256
    box_channels: int = 1024
    box_samples: int = 512
    box_positive: float = 0.25
    box_sampling: int = 2  # points on a side of a pooled cell
    mask_channels: int = 256
    mask_layers: int = 4
    mask_sampling: int = 2
    score: float = 0.05  # of a detection at least
    nms: float = 0.5
    per_image: int = 100
    test_size: int = 800  # pixels of the shorter side in evaluation
    max_size: int = 1333  # of the longer side at most
    mean: Sequence[float] = (0.485, 0.456, 0.406)
    std: Sequence[float] = (0.229, 0.224, 0.225)


def build_detector(kind: str, body: nn.Module, settings: DetectorConfig) -> nn.Module:
    """A detector on `body` (see `Backbone`), its heads drawn at random; kind: a name of KINDS.

    Raises ValueError for an unknown kind, and for what does not fit together.
    """
    return lookup(KINDS, kind, "detector")(body, settings)


def mask_rcnn(body: nn.Module, s: DetectorConfig) -> RCNN:
    """arXiv:1703.06870."""
    model = faster_rcnn(body, s)
    roi = model.roi_heads
    strides = model.backbone.strides[:-1]
    roi.mask_roi_pool = heads.Pooler(strides, heads.MASK_POOLED, s.mask_sampling)
    roi.mask_head = heads.mask_head(s.version, s.channels, s.mask_channels, s.mask_layers)
    roi.mask_predictor = heads.MaskPredictor(s.mask_channels, s.mask_channels, s.classes + 1)
    return model


def faster_rcnn(body: nn.Module, s: DetectorConfig) -> RCNN:
    """arXiv:1506.01497, on a pyramid."""
    backbone, anchors = _backbone(body, s, ("pool",))
    per_cell = anchors.num_anchors_per_location()[0]
    rpn = RegionProposalNetwork(
        anchors,
        heads.ObjectnessHead(s.channels, per_cell, conv_depth={"v1": 1, "v2": 2}[s.version]),
        *RPN_IOU,
        s.rpn_samples,
        RPN_POSITIVE,
        pre_nms_top_n=dict(zip(("training", "testing"), s.pre_nms)),
        post_nms_top_n=dict(zip(("training", "testing"), s.post_nms)),
        nms_thresh=RPN_NMS,
    )
    roi = RoIHeads(
        heads.Pooler(backbone.strides[:-1], heads.POOLED, s.box_sampling),
        heads.box_head(s.version, s.channels, s.box_channels),
        heads.BoxPredictor(s.box_channels, s.classes + 1),
        BOX_IOU,
        BOX_IOU,
        s.box_samples,
        s.box_positive,
        None,
        s.score,
        s.nms,
        s.per_image,
    )
    return RCNN(backbone, rpn, roi, _transform(backbone, s))


def retinanet(body: nn.Module, s: DetectorConfig) -> RetinaNetDetector:
    """arXiv:1708.02002, with a level for each size of anchors: at most two more than stages."""
    above = max(0, len(s.anchor_sizes) - len(s.stages))
    backbone, anchors = _backbone(body, s, ("p6", "p7")[:above])
    per_cell = anchors.num_anchors_per_location()[0]
    head = heads.dense_head(s.version, s.channels, per_cell, s.classes + 1)
    model = RetinaNetDetector(
        backbone,
        s.classes + 1,
        anchor_generator=anchors,
        head=head,
        fg_iou_thresh=DENSE_IOU[0],
        bg_iou_thresh=DENSE_IOU[1],
        score_thresh=s.score,
        nms_thresh=s.nms,
        detections_per_img=s.per_image,
    )
    model.transform = _transform(backbone, s)
    return model


KINDS = {"mask_rcnn": mask_rcnn, "faster_rcnn": faster_rcnn, "retinanet": retinanet}


def _backbone(body: nn.Module, s: DetectorConfig, extra: Sequence[str]) -> tuple[Backbone, Anchors]:
    backbone = Backbone(body, stages=s.stages, channels=s.channels, extra=extra, norm=s.norm)
    anchors = Anchors(s.anchor_sizes, s.anchor_octaves, s.anchor_ratios, backbone.strides)
    return backbone, anchors


def _transform(backbone: Backbone, s: DetectorConfig) -> Transform:
    divisor = backbone.divisor
    return Transform(s.test_size, s.max_size, list(s.mean), list(s.std), size_divisible=divisor)
