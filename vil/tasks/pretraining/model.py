"""A network without its head, and layers that are used only in pretraining.

Shapes: B images, c channels, H W size of the images in pixels.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from vil.models.vision_longformer import MsViT
from vil.optim.param_groups import number_layers
from vil.pretrained.body_weights import load_body
from vil.pretrained.load_weights import Report, load_weights
from vil.pretrained.state_dict_io import read_weights
from vil.pretrained.student import BODY, extract_student
from vil.utils.errors import CheckpointError


class PretrainingModel(nn.Module):
    """Base class of the models. A subclass defines `forward`.

    body: an MsViT or a model of timm without head. summary, dense: layers for its pooled features
    and for its last map, which weight files of the body lack. layers: what they are, for messages.
    """

    pads_images = False  # unlike a detector
    layers: ClassVar[str]

    def __init__(self, body: Any, summary: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.body, self.summary, self.dense = body, summary, dense

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the body's features of images (B, c, H, W)."""
        return self.body.forward_features(images)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the body's features."""
        return self.body.forward_head(x, pre_logits=True)

    @property
    def attention_body(self) -> nn.Module:
        """Submodule with the attention layers."""
        return self.body

    @property
    def num_layers(self) -> int:
        """Largest layer index that `layer_of` returns."""
        return max(self._layers.values()) + 1

    def layer_of(self, name: str) -> int:
        """Return the layer index of the parameter `name`, for layer-wise learning rate decay. The
        additional layers are the last one."""
        inner = name.removeprefix(BODY)
        return self.num_layers if inner == name else self._layers[inner]

    @cached_property
    def _layers(self) -> dict[str, int]:
        return number_layers(self.body)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the body's parameters to exclude from weight decay."""
        names = getattr(self.body, "no_weight_decay", set)()
        return {BODY + name for name in names}


def load_pretraining(
    model: PretrainingModel, path: Path, rule: str, *, strict: bool = False
) -> Report:
    """Load a weight file into a model, and return a report of what was loaded.

    The additional layers keep their random weights if the file has none, or those of another shape.
    rule: see `load_weights`. strict: raise CheckpointError instead.
    """
    state = read_weights(path)
    body, layers = extract_student(state)
    if isinstance(model.body, MsViT):
        report = load_weights(model.body, body, head="new", rule=rule)
    else:
        report = load_body(model.body, body, rule)
    own = {name: x for name, x in model.state_dict().items() if not name.startswith(BODY)}
    if all(name in state and state[name].shape == own[name].shape for name in own):
        model.load_state_dict({name: state[name] for name in own}, strict=False)
        report.loaded += list(own)
        return report
    if strict:
        raise CheckpointError(
            f"{path} has no {model.layers}, so they would be random: use the file only to start a "
            "training (vil train)"
        )
    report.fresh += list(own)
    report.ignored += layers
    return report
