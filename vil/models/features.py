"""Compute the features that are the input of a classifier's head.

This works for models of this package, timm and torchvision. Shapes: B images, D features.
"""

from typing import Any, cast

from torch import Tensor, nn

from vil.models.head_names import TimmModel, find_heads
from vil.utils.errors import ConfigError

# timm's classes that cannot normalize their last map: the norm is part of the head
UNNORMALIZED = ("Hiera", "HieraDet")


def pooled_features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the pooled features (B, D) of images (B, C, H, W): the input of the model's head.

    Features that are maps (B, D, X, Y) or tokens (B, L, D) are averaged over positions. Raises
    ValueError if the model does not call its head.
    """
    if hasattr(model, "forward_features") and hasattr(model, "forward_head"):
        timm_model = cast(TimmModel, model)
        tokens = timm_model.forward_features(images)
        features = timm_model.forward_head(tokens, pre_logits=True)
    else:
        features = head_input(model, images)
    if features.ndim == 4:
        return features.mean((2, 3))
    return features.mean(1) if features.ndim == 3 else features


def head_input(model: nn.Module, images: Tensor) -> Tensor:
    """Run the model on images and return the input of its classification head."""
    inputs: list[Tensor] = []
    head = find_heads(model)[0]
    hook = head.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        model(images)
    finally:
        hook.remove()
    if not inputs:
        raise ValueError(
            f"{type(model).__name__} does not call its classification head, so the input of the "
            "head cannot be recorded"
        )
    return inputs[-1]


def pooled_and_map(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pooled features (B, D) of images (B, C, H, W), and the last map (B, d, X, Y).

    Both are after the final norm, except for the map of Hiera. model: an MsViT, or a model of timm
    with the methods `forward_intermediates` and `forward_head`.
    """
    norm = type(model).__name__ not in UNNORMALIZED
    features, (last,) = model.forward_intermediates(images, indices=1, norm=norm)
    pooled = model.forward_head(features, pre_logits=True)
    return pooled, last


def check_features(network: nn.Module, subject: str) -> None:
    """Raise ConfigError if a network has no map of features, see `pooled_and_map`. subject: the
    network, at the start of the message."""
    if not (hasattr(network, "forward_intermediates") and hasattr(network, "forward_head")):
        raise ConfigError(
            f"{subject} has no grid of features: use a model of timm with the method "
            "forward_intermediates, such as timm/vit_small_patch16_224, or a model of vil"
        )


def last_channels(model: Any) -> int:
    """Return the channels d of the last map of `pooled_and_map`."""
    return _last_feature(model)["num_chs"]


def last_stride(model: Any) -> int:
    """Return the stride of the last map of `pooled_and_map`, in image pixels."""
    return _last_feature(model)["reduction"]


def _last_feature(model: Any) -> dict[str, Any]:
    info = model.feature_info  # of timm: a list, or an object that has it
    return list(getattr(info, "info", info))[-1]
