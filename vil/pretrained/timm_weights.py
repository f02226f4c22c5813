"""Convert weights of other programs to the names and shapes of a model of timm."""

import re
import sys
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

# names of transformers' Dinov2Model -> names of the original DINOv2 code, which timm reads
RENAMED = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.", ""),  # cls_token, register_tokens, mask_token
    (r"^encoder\.layer\.", "blocks."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.weights_in\.", ".mlp.w12."),
    (r"\.mlp\.weights_out\.", ".mlp.w3."),
    (r"^layernorm\.", "norm."),
)
OWN = ("embeddings.", "encoder.", "layernorm.")
PARTS = ("query", "key", "value")
QUERY = re.compile(r"(.*)\.attention\.attention\.query\.(\w+)")


def fit_timm(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict to the names and, where possible, the shapes of a model of timm.

    Renames the weights of transformers' Dinov2Model. Then applies the conversion that timm has for
    the model's family: of checkpoints of other code, such as DINOv2, DINOv3, CLIP and OpenCLIP, and
    of position embeddings and patch embeddings to another size. Weights that fit already, and those
    that timm cannot convert, are returned unchanged.
    """
    own = model.state_dict()
    if all(name in state and state[name].shape == own[name].shape for name in own):
        return dict(state)
    state = rename_dinov2(state)
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    with suppress(AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        if convert and type(model).__module__.startswith("timm."):
            return dict(convert(dict(state), model))
    return dict(state)


def rename_dinov2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' Dinov2Model to the names of the original DINOv2 code.

    The weights may be in a larger model, below a prefix such as "backbone."; its other weights are
    left out. Other state dicts are returned unchanged.
    """
    start = "encoder.layer.0.attention.attention.query.weight"
    found = next((name for name in state if name.endswith(start)), None)
    if found is None:
        return dict(state)
    prefix = found.removesuffix(start)
    inner = {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
    inner = {name: value for name, value in inner.items() if name.startswith(OWN)}
    result = {}
    for name, value in inner.items():
        if match := QUERY.fullmatch(name):
            block, leaf = match.groups()
            parts = [inner[f"{block}.attention.attention.{part}.{leaf}"] for part in PARTS]
            name, value = f"{block}.attn.qkv.{leaf}", torch.cat(parts)
        elif ".attention.attention." in name:
            continue
        for pattern, new in RENAMED:
            name = re.sub(pattern, new, name)
        result[name] = value
    # by this name, timm knows the weights of DINOv2
    result.setdefault("mask_token", torch.zeros_like(inner["embeddings.cls_token"]))
    return result
