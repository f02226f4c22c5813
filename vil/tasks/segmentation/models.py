"""Segmentation models: a network (the "body") and a head, for images of any size.

Shapes: B images, c channels, H W size of the images, K classes; for stage i of the body, from the
finest: d_i channels, X_i Y_i rows and columns of the grid.
"""

from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from vil.export.trace import in_channels
from vil.models.vision_longformer import MsViT
from vil.optim.param_groups import number_layers
from vil.pretrained.body_weights import load_body
from vil.pretrained.load_weights import Report, load_weights
from vil.pretrained.state_dict_io import read_weights
from vil.pretrained.student import extract_student
from vil.tasks.segmentation.heads import HEADS, enlarge
from vil.tasks.segmentation.keys import SMP
from vil.tasks.segmentation.smp_models import SmpHead
from vil.utils.errors import CheckpointError, one_line
from vil.utils.lookup import lookup
from vil.utils.transforms import is_exporting

BODY = "body."  # prefix of the names of the body's parameters
STAGES = 4  # number of the body's stages, the coarsest ones, that a head of this package uses


class SegmentationModel(nn.Module):
    """A body and a head, which map images to logits of the classes of every pixel.

    Images are completed at the bottom and right by zeros, the mean of normalized pixels, to whole
    cells of the coarsest map. The tokens of an MsViT do not attend to cells entirely in this
    padding, and its maps are 0 there. The logits are enlarged, and cropped to the images' size.

    body: network with `channels` and `strides` of its stages, finest first, and the method
    `forward_intermediates`, such as MsViT or `TimmBody`.
    head: module that maps the outputs of all stages to logits. It has the attributes `divisor`, of
    which the sides of images must be multiples, `stride` of the logits in pixels, and `classifier`.
    """

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, images: Tensor) -> Tensor:
        """Map normalized images (B, c, H, W) to logits (B, K, H, W), of at least 32 bits."""
        logits = self.head(self.compute_maps(images))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return pad_or_crop(enlarge(logits, self.head.stride), *images.shape[-2:])

    def compute_maps(self, images: Tensor) -> list[Tensor]:
        """Return the output map of each stage of the body, finest first, for padded images."""
        options, padded = dict(intermediates_only=True), self.pad(images)
        if isinstance(self.body, MsViT) and self.is_padded(images):
            # by two numbers, because a GPU would wait for a copy of a tensor
            place = dict(dtype=torch.int64, device=images.device)
            size = torch.stack([torch.scalar_tensor(n, **place) for n in images.shape[-2:]])
            options["valid"] = size.expand(len(images), 2)
        return self.body.forward_intermediates(padded, **options)

    def is_padded(self, images: Tensor) -> bool:
        """Return whether `pad` changes the size of images (B, c, H, W). While exporting with a
        dynamic size: whether it changes any size."""
        rests = [n % self.head.divisor for n in images.shape[-2:]]
        if is_exporting():
            return not all(statically_known_true(rest == 0) for rest in rests)
        return any(rests)

    def pad(self, images: Tensor) -> Tensor:
        """Pad images (B, c, H, W) to multiples of the head's divisor."""
        height, width = images.shape[-2:]
        divisor = self.head.divisor
        # not -(-height // divisor), because ONNX rounds the quotient of integers toward 0
        return pad_or_crop(images, height + -height % divisor, width + -width % divisor)

    @property
    def attention_body(self) -> nn.Module:
        """Submodule with the attention layers."""
        return self.body

    def get_classifier(self) -> nn.Module:
        """Return the layer whose number of outputs is the number of classes."""
        return self.head.classifier

    @property
    def num_layers(self) -> int:
        """Largest layer index that `layer_of` returns."""
        return self.body.num_layers

    def layer_of(self, name: str) -> int:
        """Return the layer index of the parameter `name`, for layer-wise learning rate decay.

        A parameter of the body has the layer index that the body gives it. Parameters of the head
        are in the last layer, `num_layers`.
        """
        inner = name.removeprefix(BODY)
        return self.num_layers if inner == name else self.body.layer_of(inner)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the body's parameters to exclude from weight decay."""
        return {BODY + name for name in self.body.no_weight_decay()}


class TimmBody(nn.Module):
    """The stages of a classifier of timm, with the methods of MsViT that a segmentation model uses.

    network: the classifier. Its final norm and head are removed. In a network whose blocks all have
    the same stride, such as a plain ViT, the stages are four groups of blocks of equal size.
    Otherwise, a stage ends with the last feature of a stride. Raises ValueError if the network has
    no intermediate features, or does not support images of any size.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not hasattr(network, "forward_intermediates"):
            raise ValueError(
                f"{type(network).__name__} has no intermediate features, which segmentation needs: "
                "set MODEL.ARCH to msvit, or to timm/NAME for a model of timm with the method "
                "forward_intermediates"
            )
        info = list(getattr(network.feature_info, "info", network.feature_info))
        ends = {feature["reduction"]: i for i, feature in enumerate(info)}
        self.indices = list(ends.values())
        if len(ends) == 1:
            self.indices = [(i + 1) * len(info) // STAGES - 1 for i in range(STAGES)]
        self.channels = [info[i]["num_chs"] for i in self.indices]
        self.strides = [info[i]["reduction"] for i in self.indices]
        network.prune_intermediate_layers(self.indices, prune_norm=True, prune_head=True)
        self.network = network
        self.check_sizes()

    def check_sizes(self) -> None:
        """Raise ValueError if the network does not support an image of 1 x 3 cells of its coarsest
        stage, or gives other maps than it declares."""
        training, side = self.network.training, max(self.strides)
        image = next(self.network.parameters()).new_zeros(1, in_channels(self), side, 3 * side)
        try:
            with torch.no_grad():
                maps = self.eval().forward_intermediates(image)
            for x, channels, stride in zip(maps, self.channels, self.strides):
                expected = channels, side // stride, 3 * side // stride
                if x.shape[1:] != expected:
                    raise ValueError(f"a map is {tuple(x.shape[1:])} instead of {expected}")
        except Exception as error:  # each network has its own exceptions
            raise ValueError(
                f"{type(self.network).__name__} does not support images of any size, which "
                f"segmentation needs: set MODEL.ARCH to another model. The error for images of "
                f"{side} x {3 * side} pixels was: {one_line(error)}"
            ) from error
        self.train(training)

    def forward_intermediates(self, x: Tensor, *, intermediates_only: bool = True) -> list[Tensor]:
        """Map x (B, c, H, W) to the output map (B, d_i, X_i, Y_i) of each stage."""
        return self.network.forward_intermediates(
            x, indices=self.indices, output_fmt="NCHW", intermediates_only=intermediates_only
        )

    @property
    def num_layers(self) -> int:
        """Layer index of a head: the largest layer index that `layer_of` returns, plus one."""
        return max(self._layers.values()) + 1

    def layer_of(self, name: str) -> int:
        """Return the layer index that timm gives to the parameter `name`."""
        return self._layers[name.removeprefix("network.")]

    @cached_property
    def _layers(self) -> dict[str, int]:
        return number_layers(self.network)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that timm excludes from weight decay."""
        names = getattr(self.network, "no_weight_decay", set)()
        return {f"network.{name}" for name in names}


def pad_or_crop(x: Tensor, rows: int, cols: int) -> Tensor:
    """Pad x (B, C, X, Y) by zeros, or crop it, at the bottom and right, to `rows` and `cols`."""
    if not is_exporting() and x.shape[-2:] == (rows, cols):  # an exported file gets other sizes
        return x
    return F.pad(x, (0, cols - x.shape[-1], 0, rows - x.shape[-2]))


def strip_classifier(network: nn.Module) -> nn.Module:
    """Turn a classifier, an MsViT or a model of timm, into the body of a segmentation model."""
    if not isinstance(network, MsViT):
        return TimmBody(network)
    network.norm, network.head = nn.Identity(), nn.Identity()
    return network


def build_model(name: str, body: nn.Module, num_classes: int, *, channels: int) -> nn.Module:
    """Build a segmentation model with a randomly initialized head.

    name: fpn, mlp or upernet, or smp/NAME for a decoder of segmentation_models_pytorch.
    body: the network, see `SegmentationModel`. channels: channels of the heads fpn, mlp, upernet.
    """
    if name.startswith(SMP):
        decoder = name.removeprefix(SMP)
        return SegmentationModel(body, SmpHead(decoder, body.channels, body.strides, num_classes))
    head = lookup(HEADS, name, "segmentation model")
    stages = body.channels[-STAGES:], body.strides[-STAGES:]
    return SegmentationModel(body, head(*stages, channels, num_classes))


def load_segmentation_weights(
    model: SegmentationModel,
    path: Path,
    *,
    head: str = "keep",
    rule: str = "linear",
    strict: bool = True,
) -> Report:
    """Load a weight file into a segmentation model, and return a report of what was loaded.

    A file of another model, such as a classifier or a detector, is loaded only into the body, and
    so is one of a segmentation model with another head, if `head` is "new".

    Args:
        head, rule: see `vil.pretrained.load_weights`.
        strict: raise CheckpointError if only the body would be loaded, with a random head.

    Raises CheckpointError if the weights do not fit the model.
    """
    state, _ = extract_student(read_weights(path))
    own = model.state_dict()
    if any(name.startswith(BODY) and name in state for name in own):
        heads = [{n for n in names if not n.startswith(BODY)} for names in (own, state)]
        if head != "new" or heads[0] == heads[1]:
            return load_weights(model, state, head=head, rule=rule)
        prefix = f"{BODY}network." if isinstance(model.body, TimmBody) else BODY
        state = {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
    if strict:
        raise CheckpointError(
            f"{path} has no weights for the head of a segmentation model, so the head would be "
            "random: use the file only to start a training (vil train)"
        )
    return load_body(getattr(model.body, "network", model.body), state, rule)
