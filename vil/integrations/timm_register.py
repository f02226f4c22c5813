"""Our models as timm has them: importing this registers every name of the zoo.

    import timm, vil.integrations.timm_register
    timm.create_model("vil_small_rpb", num_classes=10, img_size=256)
    timm.create_model("vil_tiny", features_only=True, out_indices=(1, 2, 3))

Letters: B images, c channels, H W image, d_i X_i Y_i width and grid of stage i, K classes.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from timm.layers import SelectAdaptivePool2d
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    resolve_pretrained_cfg,
)
from torch import Tensor, nn

from vil.models.arch import StageSpec, parse_arch
from vil.models.registry import ARCHS, DEFAULTS, with_windows
from vil.models.vision_longformer import MsViT, to_map
from vil.pretrained.catalog import IMAGENET, ViLWeights, by_model, notes_of
from vil.pretrained.load_weights import translate
from vil.pretrained.state_dict_io import read_weights, unwrap, weights_at

__all__ = ["ViL"]
MAP_POOLS = ("avg", "max", "avgmax", "")
TOKEN_POOLS = ("avg", "token", "")
FORMATS = {"NCHW": lambda x: x, "NHWC": lambda x: x.permute(0, 2, 3, 1)}
# a member's name in torchvision's manner -> timm's tag
TAGS = {
    "IMAGENET1K_V1": "in1k",
    "IMAGENET22K_FT_IMAGENET1K_384_V1": "in22k_ft_in1k_384",
    "IMAGENET22K_V1": "in22k",
    "DIGITS": "digits",
}


class ViL(MsViT):
    """MsViT by timm's protocol; the same parameters, and the same logits.

    global_pool: what the head reads: "avg", "max" or "avgmax" of the last map, or "" for the map
    itself. A model whose last stage has global tokens has tokens as features, (B, G+L, d), and
    reads their mean ("avg") or the first one ("token"). None: as the plain model does.
    Raises ValueError for another pool, and as MsViT.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str | None = None,
        avg_pool: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings,
    ) -> None:
        with torch.device(device) if device is not None else nullcontext():
            super().__init__(
                stages, num_classes=num_classes, in_chans=in_chans, avg_pool=avg_pool, **settings
            )
        self.to(dtype=dtype)
        self.num_classes, self.in_chans = num_classes, in_chans
        self.head_hidden_size = self.num_features
        self.feature_info = _feature_info(self.specs)
        self.gives_tokens = self.specs[-1].num_global > 0
        kept = "token" if self.gives_tokens and not avg_pool else "avg"
        self._set_pool(kept if global_pool is None else global_pool)

    # What classifiers have

    def forward(self, x: Tensor) -> Tensor:
        """x (B, c, H, W) -> logits (B, K)."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """x (B, c, H, W) -> the last stage, normalised: (B, d, X, Y), or tokens (B, G+L, d)."""
        return self.forward_intermediates(x, indices=1)[0]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features -> logits (B, K); pre_logits: what the head reads, (B, d) if it is pooled."""
        if x.ndim == 4:
            x = self.pool_map(x)
        elif self.global_pool:
            x = x.mean(1) if self.global_pool == "avg" else x[:, 0]
        if pre_logits:
            return x
        return self.head(x.movedim(1, -1)).movedim(-1, 1) if x.ndim == 4 else self.head(x)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for so many classes, none for 0; and another pool, unless None."""
        like = next(self.parameters())
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(
                self.num_features, num_classes, device=like.device, dtype=like.dtype
            )
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        self.head.train(self.training)
        self._set_pool(self.global_pool if global_pool is None else global_pool)

    def _set_pool(self, kind: str) -> None:
        pools = TOKEN_POOLS if self.gives_tokens else MAP_POOLS
        if kind not in pools:
            raise ValueError(f"global_pool must be one of {', '.join(map(repr, pools))}: {kind!r}")
        self.global_pool = kind
        of_maps = kind if kind in MAP_POOLS else "avg"
        self.pool_map = SelectAdaptivePool2d(pool_type=of_maps, flatten=bool(of_maps))
        self.pool_map.train(self.training)

    # What backbones have

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """x (B, c, H, W) -> the features, and the maps (B, d_i, X_i, Y_i) of the chosen stages in
        the order of the choice.

        indices: stages, or how many of the last; None: all. norm: the last stage's map normalised.
        stop_early: run no stage beyond the last one chosen; its map is then the features.
        output_fmt: NCHW or NHWC, of the maps. intermediates_only: the maps alone.
        """
        if output_fmt not in FORMATS:
            raise ValueError(f"output_fmt must be one of {', '.join(FORMATS)}, got {output_fmt!r}")
        chosen, last = self._take(indices)
        run = len(self.stages) if not stop_early else last + 1
        found = {}
        for at, (stage, spec) in enumerate(zip(self.stages[:run], self.specs)):
            tokens, grid, _ = stage(x)
            x = to_map(tokens, spec.num_global, grid)
            if at in chosen:
                normed = norm and at == len(self.stages) - 1
                map_ = to_map(self.norm(tokens), spec.num_global, grid) if normed else x
                found[at] = FORMATS[output_fmt](map_)
        maps = [found[at] for at in chosen]
        if intermediates_only:
            return maps
        if run < len(self.stages):
            return x, maps
        tokens = self.norm(tokens)
        return (tokens if self.gives_tokens else to_map(tokens, spec.num_global, grid)), maps

    def _take(self, indices: int | Sequence[int] | None) -> tuple[list[int], int]:
        """The chosen stages, from 0, and the last of them; ValueError for one that is not there."""
        count = len(self.stages)
        if indices is None:
            indices = count
        if isinstance(indices, int):
            if not 0 < indices <= count:
                raise ValueError(f"the last {indices} stages: there are {count}")
            indices = range(count - indices, count)
        chosen = [at + count if at < 0 else at for at in indices]
        if not chosen or min(chosen) < 0 or max(chosen) >= count:
            raise ValueError(f"indices {list(indices)}: there are {count} stages, 0 to {count - 1}")
        return chosen, max(chosen)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop what the chosen stages' maps do not need; returns the stages."""
        chosen, last = self._take(indices)
        cut = last < len(self.stages) - 1
        if cut:
            self.stages, self.specs = self.stages[: last + 1], self.specs[: last + 1]
            self.num_features = self.head_hidden_size = self.specs[-1].dim
            self.gives_tokens = False
        if cut or prune_norm:
            self.norm = nn.Identity()
        if cut or prune_head:
            self.reset_classifier(0, "")
        return chosen

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Make the position parameters for another image size, once rather than in each forward."""
        self.resize_positions(img_size)

    # What optimizers and memory ask

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpoint = enable

    def group_matcher(self, coarse: bool = False) -> dict:
        """Which layer a parameter belongs to; a later embedding goes with its stage's first block,
        as `layer_of` has it."""
        fine = [
            (r"^stages\.(\d+)\.embed", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm|^head", (99999,)),
        ]
        return {
            "stem": r"^stages\.0\.embed",
            "blocks": r"^stages\.(\d+)" if coarse else fine,
        }


def _feature_info(specs: Sequence[StageSpec]) -> list[dict]:
    found, reduction = [], 1
    for at, spec in enumerate(specs):
        reduction *= spec.patch
        found.append({"num_chs": spec.dim, "reduction": reduction, "module": f"stages.{at}"})
    return found


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
    more = {where: weights.url, **notes_of(weights)["transform"]}
    return _cfg(size, build["num_classes"], size // reduction, **more)


def _default_cfgs() -> dict[str, dict]:
    """By `name.tag`, and by the name alone for a model without weights."""
    found, of_model = {}, by_model()
    for name, arch in ARCHS.items():
        reduction = _feature_info(parse_arch(arch))[-1]["reduction"]
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
        ViL,
        name,
        pretrained,
        pretrained_cfg=pretrained_cfg,
        pretrained_cfg_overlay=overlay,
        pretrained_filter_fn=_fit,
        feature_cfg={"out_indices": tuple(range(len(stages))), "feature_cls": "getter"},
        stages=with_windows(name, stages, windows),
        **{**DEFAULTS.get(name, {}), **cfg_settings, **kwargs},
    )


def _read(file: str) -> dict[str, object]:
    """Weights in any layout that we read, and the classes of their head, as timm's cfg has them."""
    state = read_weights(weights_at(Path(file)))
    head = {"num_classes": len(state["head.weight"])} if "head.weight" in state else {}
    return {"state_dict": state, "source": "", **head}


def _weights(name: str, tag: str | None) -> ViLWeights | None:
    """The member of our table that timm's name and tag stand for."""
    return next(
        (weights for weights in by_model().get(name, ()) if TAGS[weights.name] == tag), None
    )


def _fit(state: dict, model: ViL) -> dict[str, Tensor]:
    """A file's weights under our names, positions resized; timm fits the head and first layer."""
    return translate(model, unwrap(state))


def _entry(name: str) -> Callable[..., nn.Module]:
    """The function that timm registers; it takes the name from the function."""

    def create(pretrained: bool = False, **kwargs) -> nn.Module:
        return _create(name, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name} by timm's protocol; see ViL, and vil.get_model for the settings."
    return create


for _name in ARCHS:
    setattr(sys.modules[__name__], _name, register_model(_entry(_name)))
