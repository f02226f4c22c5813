"""A student: a network without its head, and projectors to the features of a teacher.

Shapes: B images, c channels, H W size of the images in pixels; X Y rows and columns of the last
grid; D features of the teacher.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vil.models.features import last_channels, pooled_and_map
from vil.models.vision_longformer import MsViT
from vil.optim.param_groups import number_layers
from vil.pretrained.body_weights import load_body
from vil.pretrained.load_weights import Report, load_weights
from vil.pretrained.state_dict_io import read_weights
from vil.pretrained.student import BODY, extract_student
from vil.utils.errors import CheckpointError


class Student(nn.Module):
    """Predicts the features of a teacher. The projectors are used only for that.

    body: an MsViT or a model of timm without head. summary_size, dense_size: sizes D of the
    teacher's summary and dense features.
    """

    pads_images = False  # unlike a detector

    def __init__(self, body: Any, summary_size: int, dense_size: int) -> None:
        super().__init__()
        self.body = body
        self.summary = projector(body.head_hidden_size, summary_size)
        self.dense = projector(last_channels(body), dense_size)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map normalized images (B, c, H, W) to the predicted summaries (B, D) and dense features
        (B, X*Y, D) of the teacher."""
        pooled, dense = pooled_and_map(self.body, images)
        return self.summary(pooled), self.dense(dense.flatten(2).mT)

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
        projectors are in the last layer."""
        inner = name.removeprefix(BODY)
        return self.num_layers if inner == name else self._layers[inner]

    @cached_property
    def _layers(self) -> dict[str, int]:
        return number_layers(self.body)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the body's parameters to exclude from weight decay."""
        names = getattr(self.body, "no_weight_decay", set)()
        return {BODY + name for name in names}


def projector(size: int, target_size: int) -> nn.Module:
    """Build a two-layer MLP with LayerNorm and GELU between the layers, as in AM-RADIO
    (arXiv:2312.06709)."""
    return nn.Sequential(
        nn.Linear(size, target_size),
        nn.LayerNorm(target_size),
        nn.GELU(),
        nn.Linear(target_size, target_size),
    )


def load_student(model: Student, path: Path, rule: str, *, strict: bool = False) -> Report:
    """Load a weight file into a student, and return a report of what was loaded.

    The projectors keep their random weights if the file has none, or those for another teacher.
    rule: see `load_weights`. strict: raise CheckpointError instead.
    """
    state = read_weights(path)
    body, projectors = extract_student(state)
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
            f"{path} has no projectors to the features of this teacher, so they would be random: "
            "use the file only to start a training (vil train)"
        )
    report.fresh += list(own)
    report.ignored += projectors
    return report
