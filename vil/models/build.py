"""Build the MsViT that a config describes."""

import re
from collections.abc import Sequence

from yacs.config import CfgNode

from vil.config import LEGACY_ATTN_BACKENDS
from vil.config.defaults import leaves
from vil.config.rules import names_in
from vil.config.unused_keys import warn_unused
from vil.layers.attention import ATTENTIONS
from vil.models.arch import StageSpec, least_parameters, parse_arch
from vil.models.vision_longformer import MsViT
from vil.utils.errors import ConfigError, as_config_error
from vil.utils.machine import gigabytes, total_bytes


@as_config_error
def build_msvit(cfg: CfgNode, num_outputs: int) -> MsViT:
    """Build the MsViT that the config describes, with random weights and a linear head of
    `num_outputs` outputs. Raises ConfigError if the config is invalid."""
    if cfg.MODEL.PRETRAINED:
        raise ConfigError(
            "MODEL.PRETRAINED is only for timm and torchvision models: for MODEL.ARCH msvit, set "
            "MODEL.MODEL_PATH to a weight file"
        )
    vit, msvit = cfg.MODEL.VIT, cfg.MODEL.VIT.MSVIT
    attention, backend = _attention_names(msvit.ATTN_TYPE, msvit.BACKEND, msvit.ONLY_GLOBAL)
    stages = parse_arch(msvit.ARCH, attention)
    _check_size(stages, num_outputs)
    present = {name for stage in stages for name in stage.attention}
    for names, keys in _keys_by_attention().items():
        if present.isdisjoint(names):
            warn_unused(cfg, f"no stage has {' or '.join(names)} attention", keys)
    arguments = {
        name: entry.read_settings(leaves(cfg))
        for name, entry in ATTENTIONS.items()
        if entry.keys and name in present
    }
    for settings in arguments.values():
        if "backend" in settings:
            settings["backend"] = backend  # a legacy ATTN_TYPE may pin it
    model = MsViT(
        stages,
        img_size=cfg.INPUT.IMAGE_SIZE,
        in_chans=cfg.INPUT.CHANNELS,
        num_classes=num_outputs,
        drop_rate=vit.DROP,
        drop_path_rate=vit.DROP_PATH,
        grad_checkpoint=cfg.MODEL.GRAD_CHECKPOINT,
        norm_embed=vit.NORM_EMBED,
        norm_eps=msvit.LN_EPS,
        avg_pool=vit.AVG_POOL,
        pos_resize=vit.POS_RESIZE,
        reversible=vit.REVERSIBLE,
        attention_args=arguments,
    )
    model.freeze_stages(cfg.FINETUNE.FREEZE_STAGES)
    return model


def _keys_by_attention() -> dict[tuple[str, ...], list[str]]:
    """Group config keys by the attention types that read them. Returns {names of attention types:
    keys that exactly these types read}."""
    readers: dict[str, list[str]] = {}
    for name, entry in ATTENTIONS.items():
        for key in (*entry.key_names.values(), *entry.facts.get("other_keys", ())):
            readers.setdefault(key, []).append(name)
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, names in readers.items():
        keys.setdefault(tuple(names), []).append(key)
    return keys


def _attention_names(attn_type: str, backend: str, only_global: bool) -> tuple[str, str]:
    """Return (attention names, backend) for the values of keys in MODEL.VIT.MSVIT.

    In ATTN_TYPE, legacy names of the 2021 code are replaced by current ones. A legacy name also
    selects the backend, instead of BACKEND. Raises ConfigError if legacy names select different
    backends.
    """
    legacy = LEGACY_ATTN_BACKENDS
    pinned = {legacy[name] for name in names_in(attn_type) if name in legacy}
    if len(pinned) > 1:
        raise ConfigError(
            f"legacy names in ATTN_TYPE {attn_type} select several backends "
            f"({', '.join(sorted(pinned))}): replace these names by longformer, and select one "
            "backend with BACKEND"
        )
    longformer = "global" if only_global else "longformer"
    current = {**dict.fromkeys(legacy, longformer), "longformer": longformer}
    attention = re.sub(r"[^,/]+", lambda name: current.get(name[0], name[0]), attn_type)
    return attention, next(iter(pinned), backend)


def _check_size(stages: Sequence[StageSpec], num_outputs: int) -> None:
    """Raise ConfigError if a model's float32 weights exceed the memory of this machine.

    num_outputs: outputs of the head.
    """
    count = least_parameters(stages, num_outputs)
    if (size := 4 * count) > (limit := total_bytes()):
        raise ConfigError(
            f"MODEL.VIT.MSVIT.ARCH: the model has at least {count:.1e} parameters, which take "
            f"{gigabytes(size)}, more than the {gigabytes(limit)} of memory of this machine: use a "
            "smaller model"
        )
