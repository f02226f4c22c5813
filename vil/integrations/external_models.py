"""Models of timm and torchvision, trained and evaluated beside ours.

Their constructors differ; here each gets the settings it takes and is told what it does not.
"""

import logging

import timm
import torchvision
from timm.models import group_parameters
from torch import nn

from vil.utils.errors import CheckpointError
from vil.utils.lookup import lookup

PREFIX = "timm/"
# With auxiliary heads their training output would be several tensors.
AUXILIARY = {"aux_logits": False, "init_weights": True}
TORCHVISION_ARGS = {"googlenet": AUXILIARY, "inception_v3": AUXILIARY}
log = logging.getLogger(__name__)


def build_external(
    name: str,
    *,
    num_classes: int,
    img_size: int,
    pretrained: bool = False,
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    grad_checkpoint: bool = False,
) -> nn.Module:
    """`timm/<name>` or the name of a torchvision classifier: images (B, 3, S, S) -> (B, K).

    pretrained: their published weights, downloaded; a head of another size starts afresh. The drop
    rates go to timm models only. Raises ValueError for an unknown name and for what a model cannot,
    CheckpointError for weights that cannot be fetched.
    """
    try:
        if name.startswith(PREFIX):
            model = _of_timm(name, num_classes, img_size, pretrained, drop_rate, drop_path_rate)
        else:
            model = _of_torchvision(name, num_classes, img_size, pretrained)
    except OSError as error:
        raise CheckpointError(f"the weights of {name} cannot be fetched: {error}") from error
    if grad_checkpoint:
        if not hasattr(model, "set_grad_checkpointing"):
            raise ValueError(f"{name} has no gradient checkpointing")
        model.set_grad_checkpointing()
    return model


def _of_timm(
    name: str, num_classes: int, img_size: int, pretrained: bool, drop: float, drop_path: float
) -> nn.Module:
    short = name.removeprefix(PREFIX)
    table = dict.fromkeys(timm.list_models() + timm.list_pretrained())
    lookup(table, short, "timm model")
    cfg = timm.get_pretrained_cfg(short)
    size = {"img_size": img_size} if cfg and cfg.fixed_input_size else {}
    settings = {"num_classes": num_classes, "drop_rate": drop, **size}
    try:
        return timm.create_model(short, pretrained, drop_path_rate=drop_path, **settings)
    except TypeError:
        if drop_path:
            log.warning("%s has no stochastic depth: drop path %g has no effect", name, drop_path)
        return timm.create_model(short, pretrained, **settings)


def _of_torchvision(name: str, num_classes: int, img_size: int, pretrained: bool) -> nn.Module:
    known = torchvision.models.list_models(module=torchvision.models)
    lookup(dict.fromkeys(["msvit", *known]), name, "MODEL.ARCH")
    own = dict(TORCHVISION_ARGS.get(name, {}))
    builder = torchvision.models.get_model_builder(name)
    if name.startswith("vit_"):
        own["image_size"] = img_size
    model = builder(num_classes=num_classes, **own)
    if pretrained:
        state = torchvision.models.get_model_weights(name).DEFAULT.get_state_dict(check_hash=True)
        wanted = model.state_dict()
        state = {key: value for key, value in state.items() if key in wanted}
        head = [key for key, value in state.items() if value.shape != wanted[key].shape]
        if head:
            log.warning("%s starts afresh: of another size than the published", ", ".join(head))
        model.load_state_dict({**wanted, **{k: v for k, v in state.items() if k not in head}})
    return model


def find_no_decay_params(model: nn.Module) -> set[str]:
    """The parameters without weight decay: vectors and scalars (norms, biases), and what the model
    itself names."""
    named = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    return {name for name, p in model.named_parameters() if p.ndim <= 1} | set(named)


def number_layers(model: nn.Module) -> dict[str, int]:
    """{parameter: its layer, from 0}; ValueError for a model that does not number them."""
    if not hasattr(model, "group_matcher"):
        raise ValueError(f"{type(model).__name__} does not number its layers: no layer-wise decay")
    return group_parameters(model, model.group_matcher(coarse=False), reverse=True)
