"""Build the network that a config describes, find its weights, and move, shard and compile it."""

import logging
import re
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from yacs.config import CfgNode

from vil.builders.attention_backend import attention_network, backend_requests
from vil.builders.device import amp_dtype, memory_format
from vil.builders.limits import check_model_size
from vil.builders.optim import optimizer_name
from vil.config import LEGACY_ATTN_BACKENDS
from vil.config.access import own_settings, warn_unused
from vil.config.defaults import leaves
from vil.config.rules import names_in
from vil.engine.checkpoint.manifest import find_corruption
from vil.engine.checkpoint.save_load import AVERAGE, resolve_link
from vil.engine.distributed import DistInfo
from vil.engine.fsdp import shard
from vil.integrations.external_models import build_external
from vil.layers.attention import ATTENTIONS
from vil.models.arch import parse_arch
from vil.models.registry import ARCHS
from vil.models.stage import Stage
from vil.models.vision_longformer import MsViT
from vil.ops import choose
from vil.optim import OPTIMIZERS
from vil.optim.ema import Ema
from vil.pretrained import state_dict_io
from vil.pretrained.catalog import get_weight
from vil.utils.errors import CheckpointError, ConfigError, as_config_error
from vil.utils.machine import has_compiler

MEMBER = re.compile(r"ViL_\w+_Weights\.\w+")  # a weights entry of vil.pretrained.catalog
log = logging.getLogger(__name__)


@as_config_error
def build_network(cfg: CfgNode, num_outputs: int, *, load_pretrained: bool = False) -> nn.Module:
    """Build the network that the config describes, with a linear head of `num_outputs` outputs.

    The weights are random. A timm or torchvision model gets its published weights if both
    `load_pretrained` and MODEL.PRETRAINED are set. Raises ConfigError if the config is invalid.
    """
    torch.manual_seed(cfg.SEED)
    common = dict(
        num_classes=num_outputs,
        img_size=cfg.INPUT.IMAGE_SIZE,
        in_chans=cfg.INPUT.CHANNELS,
        drop_rate=cfg.MODEL.VIT.DROP,
        drop_path_rate=cfg.MODEL.VIT.DROP_PATH,
        grad_checkpoint=cfg.MODEL.GRAD_CHECKPOINT,
    )
    if cfg.MODEL.ARCH == "msvit":
        return _build_msvit(cfg, common)
    return _build_external(cfg, common, load_pretrained)


def _build_external(cfg: CfgNode, common: dict[str, Any], load_pretrained: bool) -> nn.Module:
    arch = cfg.MODEL.ARCH
    taken = ("DROP", "DROP_PATH") if arch.startswith("timm/") else ()
    unused = [f"MODEL.VIT.{key}" for key in leaves(cfg.MODEL.VIT) if key not in taken]
    warn_unused(cfg, f"{arch} is an external model", unused)
    if arch in ARCHS:
        folder = "digits" if arch == "vil_nano" else "imagenet"
        raise ConfigError(
            f"MODEL.ARCH {arch} is not an architecture but a packaged config: use "
            f"--config-file {folder}/{arch}.yaml"
        )
    if cfg.FINETUNE.FREEZE_STAGES:
        raise ConfigError(
            f"MODEL.ARCH {arch} has no stages to freeze (only msvit has stages): set "
            "FINETUNE.FREEZE_STAGES to 0"
        )
    return build_external(arch, pretrained=cfg.MODEL.PRETRAINED and load_pretrained, **common)


def _build_msvit(cfg: CfgNode, common: dict[str, Any]) -> MsViT:
    if cfg.MODEL.PRETRAINED:
        raise ConfigError(
            "MODEL.PRETRAINED is only for timm and torchvision models: for MODEL.ARCH msvit, set "
            "MODEL.MODEL_PATH to a weight file"
        )
    vit, msvit = cfg.MODEL.VIT, cfg.MODEL.VIT.MSVIT
    attention, backend = _attention_names(msvit)
    stages = parse_arch(msvit.ARCH, attention)
    check_model_size(stages, common["num_classes"])
    present = {name for stage in stages for name in stage.attention}
    for names, keys in _keys_by_attention().items():
        if present.isdisjoint(names):
            warn_unused(cfg, f"no stage has {' or '.join(names)} attention", keys)
    arguments = {n: own_settings(cfg, e) for n, e in ATTENTIONS.items() if e.keys and n in present}
    for settings in arguments.values():
        if "backend" in settings:
            settings["backend"] = backend  # a legacy ATTN_TYPE may pin it
    model = MsViT(
        stages,
        norm_embed=vit.NORM_EMBED,
        norm_eps=msvit.LN_EPS,
        avg_pool=vit.AVG_POOL,
        pos_resize=vit.POS_RESIZE,
        reversible=vit.REVERSIBLE,
        attention_args=arguments,
        **common,
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


def _attention_names(msvit: CfgNode) -> tuple[str, str]:
    """Return (attention names, backend) from the config section MODEL.VIT.MSVIT.

    In ATTN_TYPE, legacy names of the 2021 code are replaced by current ones. A legacy name also
    selects the backend, instead of BACKEND. Raises ConfigError if legacy names select different
    backends.
    """
    legacy = LEGACY_ATTN_BACKENDS
    pinned = {legacy[name] for name in names_in(msvit.ATTN_TYPE) if name in legacy}
    if len(pinned) > 1:
        raise ConfigError(
            f"legacy names in ATTN_TYPE {msvit.ATTN_TYPE} select several backends "
            f"({', '.join(sorted(pinned))}): replace these names by longformer, and select one "
            "backend with BACKEND"
        )
    longformer = "global" if msvit.ONLY_GLOBAL else "longformer"
    current = {**dict.fromkeys(legacy, longformer), "longformer": longformer}
    attention = re.sub(r"[^,/]+", lambda name: current.get(name[0], name[0]), msvit.ATTN_TYPE)
    return attention, next(iter(pinned), msvit.BACKEND)


@as_config_error
def find_weights(given: str, data_dir: str) -> Path:
    """Return the path of a weight file or checkpoint folder.

    given: a name such as "ViL_Tiny_Weights.IMAGENET1K_V1", or a path, which may be relative to
    `data_dir`. The path of a run's folder selects the run's best checkpoint. The path of a text
    file `best` or `last` selects the checkpoint that the file names.

    If the checkpoint has averaged weights (OPTIM.EMA), returns the file of these weights. Raises
    CheckpointError if there are no weights, or if the checkpoint is corrupt.
    """
    if MEMBER.fullmatch(given) and not Path(given).exists():
        return get_weight(given).file()
    given = Path(given)
    places = list(dict.fromkeys((given, Path(data_dir, given))))
    path = next((place for place in places if place.exists()), None)
    if path is None:
        others = f", nor at {places[1]}" if len(places) > 1 else ""
        raise CheckpointError(f"there are no weights at {given}{others}: check the path")
    if path.name in state_dict_io.POINTERS and path.is_file():
        path = resolve_link(path.parent, path.name)
    elif (path / "config.yaml").is_file():
        path = resolve_link(path / "checkpoints", "best")
    if path is None:
        raise CheckpointError(f"the run in {given} has no best checkpoint yet")
    if path.is_file() or (path / "config.json").is_file():  # a file, a folder of save_pretrained
        return state_dict_io.find_weights(path)
    if reason := find_corruption(path):
        raise CheckpointError(
            f"{path} is damaged, or is not a checkpoint: {reason}; give the folder of a run, the "
            "folder of a checkpoint, or a weight file"
        )
    return path / AVERAGE if (path / AVERAGE).is_file() else path


class TrainedModel(NamedTuple):
    """A model ready for training, and a moving average of its weights (None without OPTIM.EMA)."""

    model: nn.Module
    ema: Ema | None


def prepare_for_training(
    cfg: CfgNode, model: nn.Module, dist: DistInfo, device: torch.device
) -> TrainedModel:
    """Move the model to the device, then shard and compile it if the config says so.

    Also creates a moving average of the weights if OPTIM.EMA is above 0. Call this function before
    building the optimizer, because sharding replaces the parameters.
    """
    model = move_to_device(cfg, model, device)
    ema = Ema(model, cfg.OPTIM.EMA) if cfg.OPTIM.EMA else None
    models = [model, *([ema.model] if ema else [])]
    if cfg.MODEL.COMPILE and any(isinstance(m, Stage) and m.reversible for m in model.modules()):
        log.warning("MODEL.COMPILE compiles reversible blocks for evaluation, but not for training")
    _apply_fsdp(cfg, models, dist, device)
    _compile(cfg, models, device)
    return TrainedModel(model, ema)


def prepare_for_evaluation(cfg: CfgNode, model: nn.Module, device: torch.device) -> nn.Module:
    """Move the model to the device, and compile it if MODEL.COMPILE is set."""
    model = move_to_device(cfg, model, device, training=False)
    _compile(cfg, [model], device)
    return model


@as_config_error
def move_to_device(
    cfg: CfgNode, model: nn.Module, device: torch.device, *, training: bool = True
) -> nn.Module:
    """Move the model to the device, and convert it to the memory format of the config.

    Raises ConfigError if the config names an attention backend that cannot run evaluation or, if
    `training`, the backward pass on this device.
    """
    for request in backend_requests(model, cfg, device, training=training):
        choose(request.case, request.backend)
    return model.to(device, memory_format=memory_format(cfg))


def _compile(cfg: CfgNode, models: list[nn.Module], device: torch.device) -> None:
    """Set each model up to be compiled on its first call, if MODEL.COMPILE is set."""
    if not cfg.MODEL.COMPILE:
        return
    if not has_compiler(device.type):
        what = "Triton" if device.type == "cuda" else "a C++ compiler (CXX or g++)"
        raise ConfigError(
            f"MODEL.COMPILE needs {what}, which was not found: install it, or set MODEL.COMPILE to "
            "False"
        )
    for model in models:
        model.compile(mode=cfg.MODEL.COMPILE_MODE)


@as_config_error
def _apply_fsdp(
    cfg: CfgNode, models: list[nn.Module], dist: DistInfo, device: torch.device
) -> None:
    """Shard each model in place if DISTRIBUTED.STRATEGY is fsdp and there are several processes."""
    if cfg.DISTRIBUTED.STRATEGY != "fsdp" or dist.world == 1:
        return
    if cfg.AMP.ENABLED and cfg.AMP.DTYPE == "float16":
        raise ConfigError("DISTRIBUTED.STRATEGY fsdp cannot train in float16: use bfloat16")
    if not OPTIMIZERS.entry(optimizer_name(cfg)).facts.get("can_shard"):
        known = ", ".join(name for name, e in OPTIMIZERS.items() if e.facts.get("can_shard"))
        raise ConfigError(
            f"DISTRIBUTED.STRATEGY fsdp does not support the optimizer {optimizer_name(cfg)}: set "
            f"DISTRIBUTED.STRATEGY to 'ddp', or use another optimizer ({known}, or an elementwise "
            "optimizer of timm, such as timm/lion)"
        )
    for model in models:
        network = attention_network(model)
        stages = network.stages if isinstance(network, MsViT) else ()
        units = ([stage] if stage.reversible else stage.blocks for stage in stages)
        shard(model, chain.from_iterable(units), dist, device, amp_dtype(cfg))
