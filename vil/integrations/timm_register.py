"""Our models as timm has them: importing this registers every name of the zoo.

    import timm, vil.integrations.timm_register
    timm.create_model("vil_small_rpb", num_classes=10, img_size=256)
    timm.create_model("vil_tiny", features_only=True, out_indices=(1, 2, 3))

Letters: B images, c channels, H W image, d_i X_i Y_i width and grid of stage i, K classes.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    resolve_pretrained_cfg,
)
from torch import Tensor, nn

from vil.models.arch import StageSpec, parse_arch
from vil.models.registry import ARCHS, DEFAULTS, replace_windows
from vil.models.vision_longformer import MsViT
from vil.pretrained.catalog import IMAGENET, ViLWeights, get_notes, weight_classes_by_model
from vil.pretrained.load_weights import translate
from vil.pretrained.state_dict_io import find_weights, read_weights, unwrap

__all__: list[str] = []  # register_model adds the names
# a member's name in torchvision's manner -> timm's tag
TAGS = {
    "IMAGENET1K_V1": "in1k",
    "IMAGENET22K_FT_IMAGENET1K_384_V1": "in22k_ft_in1k_384",
    "IMAGENET22K_V1": "in22k",
    "DIGITS": "digits",
}


def build(
    stages: Sequence[StageSpec],
    *,
    global_pool: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **settings,
) -> MsViT:
    """Build an MsViT with the arguments that timm's factories pass beside its own.

    global_pool: see `MsViT.pool`; None for the default of the architecture.
    """
    with torch.device(device) if device is not None else nullcontext():
        model = MsViT(stages, **settings)
    if global_pool is not None:
        model.set_global_pool(global_pool)
    return model.to(dtype=dtype)


# The registry


def _cfg(size: int, num_classes: int, pool: int, **more) -> dict:
    """timm's record of weights, or of a model without. pool: the side of the last map."""
    return {
        "num_classes": num_classes,
        "input_size": (3, size, size),
        "pool_size": (pool, pool),
        "fixed_input_size": False,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        **IMAGENET,
        "first_conv": "stages.0.embed.proj",
        "classifier": "head",
        "license": "mit",
        "paper_ids": "arXiv:2103.15358",
        **more,
    }


def _cfg_of(weights: ViLWeights, reduction: int) -> dict:
    build = weights.meta["build"]
    where = "url" if weights.url.startswith("https://") else "file"
    size = build["img_size"]
    more = {where: weights.url, **get_notes(weights)["transform"]}
    return _cfg(size, build["num_classes"], size // reduction, **more)


def _default_cfgs() -> dict[str, dict]:
    """By `name.tag`, and by the name alone for a model without weights."""
    found, of_model = {}, weight_classes_by_model()
    for name, arch in ARCHS.items():
        reduction = math.prod(spec.patch for spec in parse_arch(arch))
        if name not in of_model:
            found[name] = _cfg(224, 1000, 224 // reduction)
        for weights in of_model.get(name, ()):
            star = "*" if weights is of_model[name].DEFAULT else ""
            found[f"{name}.{TAGS[weights.name]}{star}"] = _cfg_of(weights, reduction)
    return found


default_cfgs = generate_default_cfgs(_default_cfgs())


def _create(
    name: str,
    pretrained: bool,
    attention: str = "longformer",
    windows: int | Sequence[int] | None = None,
    pretrained_cfg: object = None,
    pretrained_cfg_overlay: Mapping | None = None,
    **kwargs,
) -> nn.Module:
    overlay = dict(pretrained_cfg_overlay or {})
    resolve = partial(resolve_pretrained_cfg, name, pretrained_cfg=pretrained_cfg)
    cfg = resolve(pretrained_cfg_overlay=overlay)
    weights = _weights(name, cfg.tag)
    # not by timm: it checks no sum, and takes another model's file of the same name for one of ours
    if pretrained and cfg.file and not cfg.state_dict:
        overlay = _read(cfg.file) | overlay
        cfg = resolve(pretrained_cfg_overlay=overlay)
    elif pretrained and weights and cfg.url == weights.url and not cfg.state_dict:
        overlay["state_dict"] = weights.get_state_dict()
    stages = parse_arch(ARCHS[name], attention)
    cfg_settings = {"num_classes": cfg.num_classes}
    if pretrained or pretrained_cfg is not None:  # as those weights were trained
        cfg_settings["img_size"] = cfg.input_size[-2:]
        windows = windows or (weights and weights.meta["build"].get("windows"))
    return build_model_with_cfg(
        build,
        name,
        pretrained,
        pretrained_cfg=pretrained_cfg,
        pretrained_cfg_overlay=overlay,
        pretrained_filter_fn=_fit,
        feature_cfg={"out_indices": tuple(range(len(stages))), "feature_cls": "getter"},
        stages=replace_windows(name, stages, windows),
        **{**DEFAULTS.get(name, {}), **cfg_settings, **kwargs},
    )


def _read(file: str) -> dict[str, object]:
    """Weights in any layout that we read, and the classes of their head, as timm's cfg has them."""
    state = read_weights(find_weights(Path(file)))
    head = {"num_classes": len(state["head.weight"])} if "head.weight" in state else {}
    return {"state_dict": state, "source": "", **head}


def _weights(name: str, tag: str | None) -> ViLWeights | None:
    """The member of our table that timm's name and tag stand for."""
    return next(
        (
            weights
            for weights in weight_classes_by_model().get(name, ())
            if TAGS[weights.name] == tag
        ),
        None,
    )


def _fit(state: dict, model: MsViT) -> dict[str, Tensor]:
    """A file's weights under our names, positions resized; timm fits the head and first layer."""
    return translate(model, unwrap(state))


def _entry(name: str) -> Callable[..., nn.Module]:
    """The function that timm registers; it takes the name from the function."""

    def create(pretrained: bool = False, **kwargs) -> nn.Module:
        return _create(name, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name} by timm's protocol; see MsViT, and vil.get_model for the settings."
    return create


for _name in ARCHS:
    setattr(sys.modules[__name__], _name, register_model(_entry(_name)))
