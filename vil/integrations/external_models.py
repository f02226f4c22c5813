"""Build models of timm and torchvision for training and evaluation in vil."""

import logging
import math
from typing import Any

import timm
import torchvision
from timm.models import group_parameters
from torch import nn

from vil.utils.downloads import hide_retries, root_cause
from vil.utils.errors import CheckpointError, one_line
from vil.utils.lookup import lookup

PREFIX = "timm/"
# With auxiliary heads, these models return several tensors in training.
AUXILIARY = {"aux_logits": False, "init_weights": True}
TORCHVISION_ARGS = {"googlenet": AUXILIARY, "inception_v3": AUXILIARY}
# The published weights of these models need images with mean and std HALF. With their attribute
# `transform_input`, they convert images with ImageNet's mean and std.
NORMALIZED_BY_HALF = ("googlenet", "inception_v3")
HALF = [0.5, 0.5, 0.5]
INTERPOLATIONS = {"bilinear": 2, "bicubic": 3}  # values of INPUT.INTERPOLATION
log = logging.getLogger(__name__)


def build_external(
    name: str,
    *,
    num_classes: int,
    img_size: int,
    in_chans: int = 3,
    pretrained: bool = False,
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    grad_checkpoint: bool = False,
    any_size: bool = False,
) -> nn.Module:
    """Build a classifier of timm or torchvision, which maps images (B, c, S, S) to logits (B, K).

    name: "timm/<name>" for a timm model, or the name of a torchvision model.
    num_classes, img_size, in_chans: K, S and c. torchvision models need c = 3.
    pretrained: load the published weights, and download them if needed. If they are for another
      number of classes, the head is random. If c is not 3, timm sums or repeats the weights of the
      first layer. In googlenet and inception_v3 of torchvision, `transform_input` is set.
    drop_rate, drop_path_rate: ignored by torchvision models.
    any_size: build a timm model for images of its published size that also accepts other sizes, if
      it has timm's option `dynamic_img_size`. Ignored by torchvision models.

    Raises ValueError if the name is unknown, or if the model does not support img_size,
    grad_checkpoint or `pretrained`. Raises CheckpointError if the weights cannot be downloaded.
    """
    try:
        if name.startswith(PREFIX):
            rates = drop_rate, drop_path_rate
            rest = img_size, in_chans, pretrained, *rates, any_size
            with hide_retries():
                model = _build_timm(name, num_classes, *rest)
        elif in_chans != 3:
            raise ValueError(
                f"{name}: torchvision's models need images with 3 channels, got {in_chans}: set "
                "INPUT.CHANNELS to 3, or MODEL.ARCH to msvit or a timm model"
            )
        else:
            model = _build_torchvision(name, num_classes, img_size, pretrained)
    except OSError as error:
        raise CheckpointError(
            f"the weights of {name} cannot be downloaded ({one_line(root_cause(error))}): check "
            "the network, or set pretrained (the config key MODEL.PRETRAINED) to False"
        ) from error
    if name in NORMALIZED_BY_HALF:
        model.transform_input = pretrained
    if grad_checkpoint:
        try:
            model.set_grad_checkpointing()
        except (AttributeError, AssertionError):  # no such method, or timm's `assert not enable`
            raise ValueError(
                f"{name} has no gradient checkpointing: set grad_checkpoint (the config key "
                "MODEL.GRAD_CHECKPOINT) to False"
            ) from None
    return model


def preprocessing(name: str, channels: int = 3) -> dict[str, Any]:
    """Return {config key: value} of the image preprocessing that the published weights of a model
    need: mean and std (not for other channels than RGB), center crop and interpolation.

    name: as in `build_external`. Returns {} if the model is unknown or has no published weights.
    """
    if name.startswith(PREFIX):
        if not timm.is_model_pretrained(name.removeprefix(PREFIX)):
            return {}
        cfg = timm.get_pretrained_cfg(name.removeprefix(PREFIX))
        mean, std, crop, interpolation = cfg.mean, cfg.std, cfg.crop_pct, cfg.interpolation
    else:
        if name not in torchvision.models.list_models(module=torchvision.models):
            return {}
        transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        mean, std = (HALF, HALF) if name in NORMALIZED_BY_HALF else (transform.mean, transform.std)
        interpolation = transform.interpolation.value
        # rounded down, so that INPUT.CROP_PCT gives at least the published size before the crop
        crop = math.floor(1000 * transform.crop_size[0] / transform.resize_size[0]) / 1000
    values: dict[str, Any] = {"INPUT.CROP_PCT": float(crop)}
    if interpolation in INTERPOLATIONS:
        values["INPUT.INTERPOLATION"] = INTERPOLATIONS[interpolation]
    if channels == len(mean):
        values |= {"INPUT.MEAN": list(map(float, mean)), "INPUT.STD": list(map(float, std))}
    return values


def freeze_stages(model: nn.Module, count: int, name: str) -> None:
    """Freeze the stem and the first `count` stages of the timm model `name`.

    The stages are those of timm's method `group_matcher`; in a plain ViT, each block is a stage.
    Frozen batch norms use their running statistics, and keep them. Raises ValueError if the model
    has no such method, or fewer stages.
    """
    if hasattr(model, "freeze_stages"):
        model.freeze_stages(count)
        return
    if not hasattr(model, "group_matcher"):
        raise ValueError(
            f"{name} has no stages to freeze (only msvit and timm models have stages): set "
            "FINETUNE.FREEZE_STAGES to 0"
        )
    layers = group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    num_stages = max(layers.values()) - 1  # layer 0 is the stem, and the last layer is the head
    if count > num_stages:
        raise ValueError(f"FINETUNE.FREEZE_STAGES {count}: {name} has {num_stages} stages")
    for key, parameter in model.named_parameters():
        if layers[key] <= count:
            parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.weight.requires_grad:
            module.register_forward_pre_hook(_use_running_statistics)


def _use_running_statistics(module: nn.Module, inputs: Any) -> None:
    """Put a batch norm into eval mode before its forward, also while the model is trained."""
    module.training = False


def _build_timm(
    name: str,
    num_classes: int,
    img_size: int,
    in_chans: int,
    pretrained: bool,
    drop: float,
    drop_path: float,
    any_size: bool,
) -> nn.Module:
    short = name.removeprefix(PREFIX)
    known = dict.fromkeys(timm.list_models() + timm.list_pretrained())
    lookup(known, short, "timm model")
    cfg = timm.get_pretrained_cfg(short)
    if pretrained and not (cfg and cfg.has_weights):
        raise ValueError(
            f"{name} has no published weights: set pretrained (the config key MODEL.PRETRAINED) to "
            "False, or use a model of timm.list_models(pretrained=True)"
        )
    settings = {"num_classes": num_classes, "drop_rate": drop}
    settings |= {"in_chans": in_chans} if in_chans != 3 else {}
    if cfg and cfg.fixed_input_size:
        if any_size:
            try:
                return timm.create_model(
                    short, pretrained, drop_path_rate=drop_path, dynamic_img_size=True, **settings
                )
            except TypeError:  # it has no such option
                pass
        settings["img_size"] = img_size
    try:
        return timm.create_model(short, pretrained, drop_path_rate=drop_path, **settings)
    except TypeError:
        if drop_path:
            log.warning("%s has no stochastic depth: drop_path_rate %g is ignored", name, drop_path)
        return timm.create_model(short, pretrained, **settings)


def _build_torchvision(name: str, num_classes: int, img_size: int, pretrained: bool) -> nn.Module:
    known = torchvision.models.list_models(module=torchvision.models)
    lookup(dict.fromkeys(["msvit", *known]), name, "MODEL.ARCH")
    settings = dict(TORCHVISION_ARGS.get(name, {}))
    builder = torchvision.models.get_model_builder(name)
    if name.startswith("vit_"):
        settings["image_size"] = img_size
    if name.startswith("maxvit_"):
        settings["input_size"] = (img_size, img_size)
    try:
        model = builder(num_classes=num_classes, **settings)
    except (AssertionError, ValueError) as error:  # the side is not a multiple of patch or window
        raise ValueError(
            f"{name} does not support images of {img_size} x {img_size} pixels: set img_size (the "
            f"config key INPUT.IMAGE_SIZE) to another size. The error of torchvision: "
            f"{one_line(error)}"
        ) from None
    if pretrained:
        state = torchvision.models.get_model_weights(name).DEFAULT.get_state_dict(check_hash=True)
        target = model.state_dict()
        state = {key: value for key, value in state.items() if key in target}
        head = [key for key, value in state.items() if value.shape != target[key].shape]
        if head:
            log.warning(
                "%s: these parameters are initialized randomly, because their shapes differ from "
                "those of the published weights: %s",
                name,
                ", ".join(head),
            )
        model.load_state_dict({**target, **{k: v for k, v in state.items() if k not in head}})
    return model
