"""Register the models of `vil.get_model` with timm when this module is imported.

import timm, vil.integrations.timm_register
timm.create_model("vil_small_rpb", num_classes=10, img_size=256)
timm.create_model("vil_tiny", features_only=True, out_indices=(1, 2, 3))
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from timm.layers import to_2tuple
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    resolve_pretrained_cfg,
)
from torch import nn

from vil.layers.attention.base import TABLE
from vil.models.arch import StageSpec, parse_arch
from vil.models.registry import ARCHS, DEFAULTS, replace_windows
from vil.models.vision_longformer import MsViT
from vil.pretrained.card_schema import timm_transform
from vil.pretrained.catalog import IMAGENET, get_notes, weight_classes_by_model
from vil.pretrained.convert_2021 import extract_backbone, has_2021_names, use_2021_rules
from vil.pretrained.load_weights import translate
from vil.pretrained.model_card import get_model_args, read_card
from vil.pretrained.state_dict_io import find_weights, read_weights, unwrap
from vil.utils.errors import CheckpointError

__all__: list[str] = []  # register_model adds the names
# member of a weight enum -> timm's tag
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
    """Build an MsViT. Also accepts the arguments that timm passes to every model.

    global_pool: see `MsViT.pool`; None for the default of the architecture. device, dtype: device
    and dtype of the parameters. settings: keyword arguments of MsViT.
    """
    with torch.device(device) if device is not None else nullcontext():
        model = MsViT(stages, **settings)
    if global_pool is not None:
        model.set_global_pool(global_pool)
    return model.to(dtype=dtype)


def _cfg(stride: int, settings: Mapping, **more) -> dict:
    """Return timm's pretrained config of a model, as a dict.

    stride: downsampling factor of the last stage. settings: arguments of MsViT that differ from its
    defaults. more: fields to add to the config, or to replace in it.
    """
    size, num_classes = settings.get("img_size", 224), settings.get("num_classes", 1000)
    return {
        "num_classes": num_classes,
        "input_size": (3, size, size),
        "pool_size": (size // stride, size // stride),
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


def _default_cfgs() -> dict[str, dict]:
    """Return timm's pretrained configs of all models: {"<model>.<tag>": config}.

    A tag names published weights of a model. The tag of the default weights ends with "*". A model
    without published weights has one config, with the key "<model>".
    """
    cfgs, classes = {}, weight_classes_by_model()
    for name, arch in ARCHS.items():
        stride = math.prod(spec.patch for spec in parse_arch(arch))
        if name not in classes:
            cfgs[name] = _cfg(stride, {})
        for weights in classes.get(name, ()):
            star = "*" if weights is classes[name].DEFAULT else ""
            key = "url" if weights.url.startswith("https://") else "file"
            more = {key: weights.url, **get_notes(weights)["transform"]}
            cfgs[f"{name}.{TAGS[weights.name]}{star}"] = _cfg(stride, weights.meta["build"], **more)
    return cfgs


default_cfgs = generate_default_cfgs(_default_cfgs())


def _create(
    name: str,
    pretrained: bool,
    attention: str | None = None,
    windows: int | Sequence[int] | None = None,
    pretrained_cfg: object = None,
    pretrained_cfg_overlay: Mapping | None = None,
    **kwargs,
) -> nn.Module:
    """Build the model `name` or, with features_only=True, its feature extractor, as timm does.

    pretrained, pretrained_cfg, pretrained_cfg_overlay: see `timm.create_model`. attention: see
    `parse_arch`. windows: see `replace_windows`. kwargs: arguments of `build` and of timm's
    `build_model_with_cfg`.

    The defaults of `attention`, `windows` and the arguments of `build` depend on the requested
    weights. For published weights and for a file with a model card, they are the settings with
    which the weights were trained.
    """
    overlay = dict(pretrained_cfg_overlay or {})
    resolve = partial(resolve_pretrained_cfg, name, pretrained_cfg=pretrained_cfg)
    cfg = resolve(pretrained_cfg_overlay=overlay)
    members = weight_classes_by_model().get(name, ())
    weights = next((each for each in members if TAGS[each.name] == cfg.tag), None)
    settings = {"attention": "longformer", **DEFAULTS.get(name, {})}
    is_described = pretrained or pretrained_cfg is not None
    if is_described and weights:
        settings |= weights.meta["build"]
    # read the weights here: timm verifies no hash, and its cache confuses files of the same name
    if pretrained and cfg.file and not cfg.state_dict:
        fields = _read_file(cfg.file)
        if card := read_card(name, Path(cfg.file)):
            settings |= get_model_args(card)
            if not isinstance(pretrained_cfg, Mapping):  # such as config.json, which users may edit
                size = (cfg.input_size[0], *to_2tuple(card["model"]["img_size"]))
                fields |= {"input_size": size, **timm_transform(card)}
        overlay = fields | overlay
        cfg = resolve(pretrained_cfg_overlay=overlay)
    elif pretrained and weights and cfg.url == weights.url and not cfg.state_dict:
        overlay["state_dict"] = weights.get_state_dict()
    settings["num_classes"] = cfg.num_classes
    if is_described:
        settings["img_size"] = cfg.input_size[-2:]
    given = {"attention": attention, "windows": windows}
    settings |= {key: value for key, value in given.items() if value is not None} | kwargs
    stages = parse_arch(ARCHS[name], settings.pop("attention"))
    return build_model_with_cfg(
        build,
        name,
        pretrained,
        pretrained_cfg=pretrained_cfg,
        pretrained_cfg_overlay=overlay,
        pretrained_filter_fn=_fit_weights,
        feature_cfg={"out_indices": tuple(range(len(stages))), "feature_cls": "getter"},
        stages=replace_windows(name, stages, settings.pop("windows", None)),
        **settings,
    )


def _read_file(file: str) -> dict[str, object]:
    """Read a weight file. Returns the fields of timm's pretrained config for these weights.

    The fields are `state_dict`, an empty `source` and, if the weights have a head, `num_classes`.
    """
    state = read_weights(find_weights(Path(file)))
    head = {"num_classes": len(state["head.weight"])} if "head.weight" in state else {}
    return {"state_dict": state, "source": "", **head}


def _fit_weights(state_dict: Mapping[str, object], model: MsViT) -> dict[str, torch.Tensor]:
    """Convert a state dict to the parameter names and shapes of a model, see `translate`.

    For weights of the original Vision Longformer code (2021), the model is also set to compute like
    this code.
    """
    state, _ = extract_backbone(unwrap(state_dict))
    if has_2021_names(state):
        use_2021_rules(model)
    _check_tables(model, state)
    return translate(model, state)


def _check_tables(model: MsViT, state: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError if a relative position table would be read with other rows and columns
    than it has, because `translate` takes tables of another length to be square."""
    own = tuple(to_2tuple(model.settings["img_size"]))
    size = tuple((getattr(model, "pretrained_cfg", None) or {}).get("input_size", ())[1:])
    sized = [name for name, module in model.named_modules() if getattr(module, "param_grid", None)]
    tables = [key for name in sized if (key := f"{name}.{TABLE}") in state]
    is_read = [len(state[key]) == len(model.get_parameter(key)) for key in tables]
    wrong = len({*size}) > 1 or (len({*own}) > 1 and any(is_read))
    if tables and size not in ((), own) and wrong:
        raise CheckpointError(
            f"the weights are for images of {size} pixels, the model for {own}: timm does not "
            "resize relative position tables between such sizes, use vil.from_pretrained"
        )


def _make_entrypoint(name: str) -> Callable[..., nn.Module]:
    """Return a function that builds the model `name`. timm registers the function under its
    `__name__`."""

    def create(pretrained: bool = False, **kwargs) -> nn.Module:
        return _create(name, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"Build {name}. See MsViT and vil.get_model for the settings."
    return create


for _name in ARCHS:
    setattr(sys.modules[__name__], _name, register_model(_make_entrypoint(_name)))
