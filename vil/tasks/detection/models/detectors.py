"""torchvision's detectors with a backbone of this package, for batches of images of any sizes.

The backbone, a network (the "body") and a feature pyramid, processes the padded batch. The heads
process each image separately, on pyramid levels without padding. So the detections of an image do
not depend on the other images of the batch.

Shapes: B images, n objects of an image, K categories.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.transforms.v2.functional import resize

from vil.layers.padding import downsample_valid
from vil.tasks.detection.models import heads
from vil.tasks.detection.models.fpn import Backbone, Levels, pyramid_distance
from vil.utils.lookup import lookup
from vil.utils.memory import copy_to_device

BODY = "backbone.body."  # prefix of the names of the body's parameters
Tensors = dict[str, Tensor]
Targets = list[Tensors]
Output = Tensors | list[Tensors]  # losses in training, detections in evaluation


class Transform(GeneralizedRCNNTransform):
    """Input transform that normalizes images, resizes them in eval mode only, and pads them."""

    def resize(self, image: Tensor, target: Tensors | None = None) -> tuple[Tensor, Tensors | None]:
        if self.training:
            return image, target
        height, width = image.shape[-2:]
        factor = min(self.min_size[-1] / min(height, width), self.max_size / max(height, width))
        size = [max(1, round(height * factor)), max(1, round(width * factor))]
        return resize(image, size, antialias=True), target


class PerImageDetector:
    """Mixin for R-CNN and RetinaNet that makes their heads process each image separately."""

    @property
    def attention_body(self) -> nn.Module:
        """Submodule with the attention layers: the network before the feature pyramid."""
        return self.backbone.body

    def compile(self, **options) -> None:
        """Compile only the backbone, because tensor shapes in the heads depend on the data.

        options: arguments of `torch.nn.Module.compile`.
        """
        self.backbone.compile(dynamic=True, **options)

    def preprocess(
        self, images: Sequence[Tensor], targets: Targets | None
    ) -> tuple[list[ImageList], list[Tensors], Targets | None]:
        """Normalize and pad a batch, run the backbone, and split its output by image.

        Returns (single, levels, targets). single: for each image, an ImageList of this image alone.
        levels: for each image, its feature pyramid without padding, {level name: (1, C, H, W)}.
        Raises ValueError in training mode if an image has no target or a box has no area.
        """
        if self.training:
            check_targets(images, targets)
        batch, targets = self.transform(list(images), targets)
        levels = self.extract(batch)
        single = [ImageList(x[None], [size]) for x, size in zip(batch.tensors, batch.image_sizes)]
        return single, levels, targets

    def extract(self, batch: ImageList) -> list[Tensors]:
        """Return the pyramid of each image of a batch, without padding, {level name: (1, C, H,
        W)}."""
        sizes = torch.tensor(batch.image_sizes)
        levels = self.backbone(batch.tensors, copy_to_device(sizes, batch.tensors.device))
        return crop_levels(levels, sizes, self.backbone.strides)

    def pyramid(self, images: Sequence[Tensor]) -> list[Levels]:
        """Return the pyramid of each image (3, H, W) at its size, which a student learns."""
        normalized = [self.transform.normalize(image) for image in images]
        tensors = self.transform.batch_images(normalized, self.transform.size_divisible)
        levels = self.extract(ImageList(tensors, [tuple(x.shape[-2:]) for x in images]))
        return [self.by_stride(maps) for maps in levels]

    def by_stride(self, maps: Tensors) -> Levels:
        """Name the levels of an image by their strides, without "pool"."""
        return dict(zip(self.backbone.learned_strides, maps.values()))

    def imitate(self, levels: list[Tensors], wanted: list[Levels] | None) -> Tensors:
        """Return the loss "teacher", the mean distance of the images' pyramids from those of a
        teacher. wanted: the teacher's; None: there is no such loss."""
        if wanted is None:
            return {}
        pairs = zip(map(self.by_stride, levels), wanted)
        return average([{"teacher": pyramid_distance(*pair)} for pair in pairs])

    @property
    def num_layers(self) -> int:
        """Largest layer index that `layer_of` returns."""
        return self.backbone.body.num_layers

    def layer_of(self, name: str) -> int:
        """Return the layer index of the parameter `name`, for layer-wise learning rate decay.

        A parameter of the network before the feature pyramid has the layer index that this network
        gives it. Parameters of the pyramid and the heads are in the last layer, `num_layers`.
        """
        inner = name.removeprefix(BODY)
        return self.num_layers if inner == name else self.backbone.body.layer_of(inner)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters to exclude from weight decay.

        All of them are in the network before the feature pyramid.
        """
        return {BODY + name for name in self.backbone.body.no_weight_decay()}

    def to_input_pixels(
        self, outputs: list[Tensors], single: list[ImageList], images: Sequence[Tensor]
    ) -> list[Tensors]:
        """Rescale detections to pixels of the input images.

        outputs: for each image, a dict with boxes in pixels of the resized image. single: for each
        image, an ImageList with the resized image. images: the input images, before resizing.
        """
        sizes = [one.image_sizes[0] for one in single]
        return self.transform.postprocess(outputs, sizes, [tuple(x.shape[-2:]) for x in images])


class RCNN(PerImageDetector, FasterRCNN):
    """Faster R-CNN or Mask R-CNN, with the same calls as torchvision's models.

    In training mode, model(images, targets) returns a dict of losses; a third argument, the
    pyramids of a teacher, adds the loss "teacher". In eval mode, model(images)
    returns a dict for each image: `boxes` (n, 4), `labels` (n,), `scores` (n,) and, for Mask R-CNN,
    `masks` (n, 1, H, W). Images are (3, H, W) with values in 0..1. Labels are 1 to K.
    """

    def get_classifier(self) -> list[nn.Module]:
        """Return the layers whose number of outputs depends on the number of categories."""
        roi = self.roi_heads
        masks = [roi.mask_predictor.mask_fcn_logits] if roi.has_mask() else []
        return [roi.box_predictor.cls_score, roi.box_predictor.bbox_pred, *masks]

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Targets | None = None,
        wanted: list[Levels] | None = None,
    ) -> Output:
        single, levels, targets = self.preprocess(images, targets)
        each = targets or [None] * len(single)
        proposed = [self.rpn(s, f, t and [t]) for s, f, t in zip(single, levels, each)]
        boxes = [boxes for (boxes,), _ in proposed]
        sizes = [one.image_sizes[0] for one in single]
        outputs, losses = self.roi_heads(levels, boxes, sizes, targets)
        if self.training:
            each = average([losses for _, losses in proposed])
            return losses | each | self.imitate(levels, wanted)
        return self.to_input_pixels(outputs, single, images)


class RetinaNetDetector(PerImageDetector, RetinaNet):
    """RetinaNet, which predicts boxes, but no masks. It is called like `RCNN`."""

    def get_classifier(self) -> list[nn.Module]:
        """Return the layers whose number of outputs depends on the number of categories."""
        return [self.head.classification_head.cls_logits]

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Targets | None = None,
        wanted: list[Levels] | None = None,
    ) -> Output:
        single, levels, targets = self.preprocess(images, targets)
        each = [list(maps.values()) for maps in levels]
        outputs = [self.head(maps) for maps in each]
        anchors = [self.anchor_generator(one, maps) for one, maps in zip(single, each)]
        if self.training:
            losses = average([
                self.compute_loss([target], output, boxes)
                for target, output, boxes in zip(targets, outputs, anchors)
            ])  # fmt: skip
            return losses | self.imitate(levels, wanted)
        per_cell = self.anchor_generator.num_anchors_per_location()[0]
        detections = []
        for one, maps, output, (boxes,) in zip(single, each, outputs, anchors):
            counts = [level[0, 0].numel() * per_cell for level in maps]
            # (1, anchors, 1 + K): torchvision would report the first column as label 0
            logits = F.pad(output["cls_logits"][..., 1:], (1, 0), value=-torch.inf)
            output = {**output, "cls_logits": logits}
            split = {name: list(x.split(counts, dim=1)) for name, x in output.items()}
            anchors_of = [list(boxes.split(counts))]
            detections += self.postprocess_detections(split, anchors_of, one.image_sizes)
        return self.to_input_pixels(detections, single, images)


def crop_levels(levels: Tensors, sizes: Tensor, strides: Sequence[int]) -> list[Tensors]:
    """Split the pyramid levels of a padded batch by image, and crop the padding.

    levels: {name: (B, C, X, Y)}. sizes (B, 2), on the CPU: height and width of each image in
    pixels. strides: stride of each level. Returns {name: (1, C, x, y)} for each image, with the x
    rows and y columns that are not padding.
    """
    valid = torch.stack([downsample_valid(sizes, stride) for stride in strides], dim=1).tolist()
    each = [level.split(1) for level in levels.values()]  # one backward op for all images
    return [
        {name: level[:, :, :rows, :cols] for name, level, (rows, cols) in zip(levels, image, cells)}
        for image, cells in zip(zip(*each), valid)
    ]


def average(losses: Sequence[Tensors]) -> Tensors:
    """Average each loss over images. losses: a dict {name of the loss: scalar} for each image."""
    return {name: torch.stack([one[name] for one in losses]).mean() for name in losses[0]}


def check_targets(images: Sequence[Tensor], targets: Targets | None) -> None:
    """Raise ValueError unless there is one target per image, and every box has a positive area."""
    if targets is None or len(targets) != len(images):
        count = "no" if targets is None else len(targets)
        raise ValueError(
            f"training needs one target per image, got {len(images)} images and {count} targets"
        )
    for i, target in enumerate(targets):
        boxes = target["boxes"]
        empty = ~(boxes[:, 2:] > boxes[:, :2]).all(dim=1)
        if empty.any():
            raise ValueError(
                f"image {i}: box {boxes[empty][0].tolist()} has no area (expected x1 < x2, y1 < y2)"
            )


@dataclass(frozen=True)
class DetectorConfig:
    """Settings of a detector. The defaults are for Mask R-CNN on COCO."""

    classes: int  # K, without background
    version: str = "v1"  # version of the heads: "v1" or "v2"
    fpn_stages: Sequence[int] = (1, 2, 3, 4)  # stages of the body that enter the pyramid, from 1
    fpn_channels: int = 256  # of each level of the pyramid
    fpn_norm: bool = False  # LayerNorm on each stage's output
    anchors_sizes: Sequence[float] = (32, 64, 128, 256, 512)  # pixels, one per level
    anchors_octaves: int = 1  # anchor sizes per level
    anchors_ratios: Sequence[float] = (0.5, 1.0, 2.0)  # height / width
    rpn_pre_nms_train: int = 2000  # proposals per level before NMS
    rpn_pre_nms_test: int = 1000
    rpn_post_nms_train: int = 1000  # proposals per image after NMS
    rpn_post_nms_test: int = 1000
    rpn_samples: int = 256  # anchors per image in the loss
    box_channels: int = 1024
    box_samples: int = 512  # proposals per image in the loss
    box_positive: float = 0.25  # maximum fraction of them that match an object
    box_sampling_ratio: int = 2  # sampling points along each side of a pooled cell
    mask_channels: int = 256
    mask_layers: int = 4
    mask_sampling_ratio: int = 2
    score: float = 0.05  # minimum score of a detection
    nms: float = 0.5  # IoU threshold
    per_image: int = 100  # maximum number of detections
    test_size: int = 800  # pixels of the shorter side in evaluation
    max_size: int = 1333  # limit of the longer side
    mean: Sequence[float] = (0.485, 0.456, 0.406)
    std: Sequence[float] = (0.229, 0.224, 0.225)


def build_detector(name: str, body: nn.Module, config: DetectorConfig) -> nn.Module:
    """Build the detector `name`, a key of DETECTORS, with randomly initialized heads.

    body: the network before the feature pyramid, such as MsViT, see `Backbone`. Raises ValueError
    if the name is unknown or the settings contradict each other.
    """
    return lookup(DETECTORS, name, "detector")(body, config)


def mask_rcnn(body: nn.Module, s: DetectorConfig) -> RCNN:
    """Build Mask R-CNN (arXiv:1703.06870)."""
    model = faster_rcnn(body, s)
    roi, strides = model.roi_heads, model.backbone.strides[:-1]
    roi.mask_roi_pool = heads.Pooler(strides, heads.MASK_POOLED, s.mask_sampling_ratio)
    norm, channels = nn.BatchNorm2d if s.version == "v2" else None, s.mask_channels
    roi.mask_head = MaskRCNNHeads(s.fpn_channels, [channels] * s.mask_layers, 1, norm_layer=norm)
    roi.mask_predictor = heads.to_float32(MaskRCNNPredictor(channels, channels, s.classes + 1))
    return model


def faster_rcnn(body: nn.Module, s: DetectorConfig) -> RCNN:
    """Build Faster R-CNN with a feature pyramid (arXiv:1506.01497)."""
    backbone, anchors = _backbone(body, s, ("pool",))
    per_cell = anchors.num_anchors_per_location()[0]
    rpn_head = RPNHead(s.fpn_channels, per_cell, conv_depth={"v1": 1, "v2": 2}[s.version])
    model = RCNN(
        backbone,
        rpn_anchor_generator=anchors,
        rpn_head=heads.to_float32(rpn_head),
        rpn_pre_nms_top_n_train=s.rpn_pre_nms_train,
        rpn_pre_nms_top_n_test=s.rpn_pre_nms_test,
        rpn_post_nms_top_n_train=s.rpn_post_nms_train,
        rpn_post_nms_top_n_test=s.rpn_post_nms_test,
        rpn_batch_size_per_image=s.rpn_samples,
        box_roi_pool=heads.Pooler(backbone.strides[:-1], heads.POOLED, s.box_sampling_ratio),
        box_head=heads.box_head(s.version, s.fpn_channels, s.box_channels),
        box_predictor=heads.to_float32(FastRCNNPredictor(s.box_channels, s.classes + 1)),
        box_batch_size_per_image=s.box_samples,
        box_positive_fraction=s.box_positive,
        **dict(box_score_thresh=s.score, box_nms_thresh=s.nms, box_detections_per_img=s.per_image),
    )
    model.transform = _transform(backbone, s)
    return model


def retinanet(body: nn.Module, s: DetectorConfig) -> RetinaNetDetector:
    """Build RetinaNet (arXiv:1708.02002) with one pyramid level per size in `anchors_sizes`.

    Each stage in `fpn_stages` gives a level. Up to two coarser levels are added. Raises ValueError
    unless the number of sizes minus the number of stages is 0, 1 or 2.
    """
    num_extra = max(0, len(s.anchors_sizes) - len(s.fpn_stages))
    backbone, anchors = _backbone(body, s, ("p6", "p7")[:num_extra])
    per_cell = anchors.num_anchors_per_location()[0]
    head = heads.dense_head(s.version, s.fpn_channels, per_cell, s.classes + 1)
    model = RetinaNetDetector(
        backbone,
        s.classes + 1,
        anchor_generator=anchors,
        head=heads.to_float32(head),
        **dict(score_thresh=s.score, nms_thresh=s.nms, detections_per_img=s.per_image),
    )
    model.transform = _transform(backbone, s)
    return model


DETECTORS = {"mask_rcnn": mask_rcnn, "faster_rcnn": faster_rcnn, "retinanet": retinanet}


def _backbone(
    body: nn.Module, s: DetectorConfig, extra: Sequence[str]
) -> tuple[Backbone, heads.Anchors]:
    backbone = Backbone(body, s.fpn_stages, s.fpn_channels, extra, s.fpn_norm)
    anchors = heads.Anchors(s.anchors_sizes, s.anchors_octaves, s.anchors_ratios, backbone.strides)
    return backbone, anchors


def _transform(backbone: Backbone, s: DetectorConfig) -> Transform:
    divisor = backbone.divisor
    return Transform(s.test_size, s.max_size, list(s.mean), list(s.std), size_divisible=divisor)
