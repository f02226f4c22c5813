"""The bridge from a config to objects. Only here and in the commands is the config seen.

Each function reads the keys it needs and calls with explicit arguments. A setting that the objects
refuse becomes a ConfigError, so that every command ends with one line and the same exit code.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from yacs.config import CfgNode

from vil import build_backends, build_detection
from vil.build_backends import Asked, network_in
from vil.config import HISTORIC, ConfigError
from vil.config.defaults import KEYS, leaves, names_in
from vil.config.unused import warn_unused
from vil.data.mixup import Mix
from vil.engine import distributed
from vil.engine.checkpoint.manifest import find_corruption
from vil.engine.checkpoint.save_load import AVERAGE, resolve_link
from vil.engine.distributed import DistInfo
from vil.engine.task import ClassificationTask, Task
from vil.integrations.external_models import build_external, find_no_decay_params, number_layers
from vil.models.arch import parse_arch
from vil.models.registry import ARCHS as NAMED
from vil.models.vision_longformer import MsViT
from vil.ops import choose
from vil.optim import Schedule, decay_groups
from vil.optim import build_optimizer as optimizer_by_name
from vil.optim.ema import Ema
from vil.pretrained.catalog import get_weight
from vil.pretrained.load_weights import load_weights
from vil.pretrained.state_dict_io import find_weights
from vil.tasks.classification.losses import build_loss
from vil.tasks.detection.models.detectors import PerImageDetector
from vil.tasks.detection.models.weights import load_detector
from vil.utils.errors import CheckpointError
from vil.utils.machine import has_compiler

# The keys of MODEL.VIT.MSVIT that only some attentions read.
OWN_KEYS = {
    ("longformer",): ("SW_EXACT", "MODE", "VIL_MODE_SWITCH", "BACKEND", "TUNE"),
    ("longformer", "global"): ("SHARE_W", "ONLY_GLOBAL"),
    ("linformer",): ("SHARE_KV",),
    ("performer",): ("PERFORMER_BATCH_MAX",),
    ("srformer",): ("SR_RAGGED",),
}
log = logging.getLogger(__name__)
AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
POINTERS = ("best", "last")
MEMBER = re.compile(r"ViL_\w+_Weights\.\w+")  # of vil.pretrained.catalog
SPREAD_OPTIMIZERS = ("adamw", "adam", "sgd", "lamb")  # those that take slices of parameters
# Convolutions that a CPU keeps compiled, each for one shape. oneDNN's own 1,024 are too few where
# pictures have many sizes: a detector's steps compiled most of theirs anew.
ONEDNN_KERNELS = 8192
MEMORY_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def refuses(build: Callable) -> Callable:
    """What the objects refuse with a ValueError is a fault of the config."""

    @functools.wraps(build)
    def wrapped(*args, **kwargs):
        try:
            return build(*args, **kwargs)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error

    return wrapped


@refuses
def set_up(cfg: CfgNode) -> torch.device:
    """The device, with torch's global switches set."""
    torch.backends.cudnn.allow_tf32 = cfg.AMP.TF32
    torch.set_float32_matmul_precision("high" if cfg.AMP.TF32 else "highest")
    torch.autograd.set_detect_anomaly(cfg.SOLVER.DETECT_ANOMALY)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(ONEDNN_KERNELS))
    if cfg.DETERMINISTIC:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = _device(cfg.DEVICE)
    half = device.type == "cuda" and amp_dtype(cfg) is torch.bfloat16
    if half and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"AMP.DTYPE bfloat16: {name} has none, use float16")
    return device


def _device(name: str) -> torch.device:
    found = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, there in found.items() if there))
    device = torch.device(name)
    if not found[device.type]:
        raise ConfigError(
            f"DEVICE {name} is not there (available: {', '.join(k for k, v in found.items() if v)})"
        )
    if (device.index or 0) >= max(torch.cuda.device_count(), 1):
        raise ConfigError(f"DEVICE {name} is not there ({torch.cuda.device_count()} CUDA devices)")
    return device


def amp_dtype(cfg: CfgNode) -> torch.dtype | None:
    """The precision of autocast; None: full."""
    return AMP_DTYPES[cfg.AMP.DTYPE] if cfg.AMP.ENABLED else None


@contextmanager
def joined(cfg: CfgNode, device: torch.device) -> Iterator[DistInfo]:
    """This process among those that torchrun started; it leaves their group at the end."""
    backend = {"cuda": cfg.DISTRIBUTED_BACKEND}.get(device.type)  # on a CPU gloo
    ranks = refuses(distributed.start)(backend, device)
    try:
        yield ranks
    finally:
        distributed.stop()


@refuses
def build_model(cfg: CfgNode, *, weights_follow: bool = False) -> nn.Module:
    """The network, freshly initialised from SEED or, with MODEL.PRETRAINED, as published; with
    DETECTION.MODEL the detector on it.

    weights_follow: others are loaded afterwards, so that nothing need be fetched.
    """
    torch.manual_seed(cfg.SEED)
    if cfg.DETECTION.MODEL and cfg.MODEL.ARCH != "msvit":
        raise ConfigError(f"DETECTION.MODEL stands on msvit, not on MODEL.ARCH {cfg.MODEL.ARCH}")
    common = dict(
        num_classes=cfg.DATA.NUM_CLASSES,
        img_size=cfg.INPUT.IMAGE_SIZE,
        drop_rate=cfg.MODEL.VIT.DROP,
        drop_path_rate=cfg.MODEL.VIT.DROP_PATH,
        grad_checkpoint=cfg.MODEL.GRAD_CHECKPOINT,
    )
    if cfg.MODEL.ARCH != "msvit":
        taken = ("DROP", "DROP_PATH") if cfg.MODEL.ARCH.startswith("timm/") else ()
        unused = [f"MODEL.VIT.{key}" for key in leaves(cfg.MODEL.VIT) if key not in taken]
        warn_unused(cfg, f"{cfg.MODEL.ARCH} is none of our models", unused)
        if cfg.MODEL.ARCH in NAMED:
            name = cfg.MODEL.ARCH
            folder = "digits" if name == "vil_nano" else "imagenet"
            raise ConfigError(f"MODEL.ARCH {name} is a config: --config-file {folder}/{name}.yaml")
        pretrained = cfg.MODEL.PRETRAINED and not weights_follow
        model = build_external(cfg.MODEL.ARCH, pretrained=pretrained, **common)
        if cfg.FINETUNE.FREEZE_STAGES:
            raise ConfigError(f"FINETUNE.FREEZE_STAGES: {cfg.MODEL.ARCH} has no stages of ours")
        return model
    if cfg.MODEL.PRETRAINED:
        raise ConfigError("MODEL.PRETRAINED: for msvit give the weights' file as MODEL.MODEL_PATH")
    model = _build_msvit(cfg, common)
    model.freeze_stages(cfg.FINETUNE.FREEZE_STAGES)
    return build_detection.detector(cfg, model) if cfg.DETECTION.MODEL else model


def _build_msvit(cfg: CfgNode, common: dict[str, Any]) -> MsViT:
    vit, msvit = cfg.MODEL.VIT, cfg.MODEL.VIT.MSVIT
    attention, backend = _attention_names(msvit)
    stages = parse_arch(msvit.ARCH, attention)
    present = {name for stage in stages for name in stage.attention}
    for names, keys in OWN_KEYS.items():
        if present.isdisjoint(names):
            why = f"no stage has {' or '.join(names)} attention"
            warn_unused(cfg, why, [f"MODEL.VIT.MSVIT.{key}" for key in keys])
    return MsViT(
        stages,
        norm_embed=vit.NORM_EMBED,
        norm_eps=msvit.LN_EPS,
        avg_pool=vit.AVG_POOL,
        pos_resize=vit.POS_RESIZE,
        attention_args={
            "longformer": dict(
                share_weights=msvit.SHARE_W,
                sw_exact=msvit.SW_EXACT,
                mode=msvit.MODE,
                mode_switch=msvit.VIL_MODE_SWITCH,
                backend=backend,
            ),
            "global": dict(share_weights=msvit.SHARE_W),
            "linformer": dict(share_kv=msvit.SHARE_KV),
            "performer": dict(batch_max=msvit.PERFORMER_BATCH_MAX),
            "srformer": dict(ragged=msvit.SR_RAGGED),
        },
        **common,
    )


def _attention_names(msvit: CfgNode) -> tuple[str, str]:
    """ATTN_TYPE in today's names, and the backend that BACKEND or a historic name pins."""
    pinned = {HISTORIC[name] for name in names_in(msvit.ATTN_TYPE) if name in HISTORIC}
    if len(pinned) > 1:
        raise ConfigError(f"ATTN_TYPE {msvit.ATTN_TYPE} pins several backends: {sorted(pinned)}")
    longformer = "global" if msvit.ONLY_GLOBAL else "longformer"
    today = {**dict.fromkeys(HISTORIC, longformer), "longformer": longformer}
    attention = re.sub(r"[^,/]+", lambda name: today.get(name[0], name[0]), msvit.ATTN_TYPE)
    return attention, next(iter(pinned), msvit.BACKEND)


@refuses
def place(
    model: nn.Module, cfg: CfgNode, device: torch.device, *, training: bool = True
) -> nn.Module:
    """The model on its device, in its memory format. Refuses a pinned backend that cannot run."""
    for asked in attention_cases(model, cfg, device, training=training):
        choose(asked.case, asked.backend)
    return model.to(device, memory_format=MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT])


def compile_models(cfg: CfgNode, device: torch.device, *models: nn.Module) -> None:
    """With MODEL.COMPILE: torch compiles each model, in place, when it is first called. Parameters
    keep their names. Once models are placed and spread."""
    if not cfg.MODEL.COMPILE:
        return
    if not has_compiler(device.type):
        what = "Triton" if device.type == "cuda" else "a C++ compiler (CXX or g++)"
        raise ConfigError(f"MODEL.COMPILE needs {what}, which is not there")
    for model in models:
        if isinstance(model, PerImageDetector):  # what follows depends on what is found
            model.backbone.compile(dynamic=True)
        else:
            model.compile()


def attention_cases(
    model: nn.Module, cfg: CfgNode, device: torch.device, *, training: bool = True, world: int = 1
) -> list[Asked]:
    """What the stages ask backends for, in training and in evaluation, or in evaluation alone."""
    facts = dict(training=training, world=world)
    return list(build_backends.attention_cases(model, cfg, device, amp_dtype(cfg), **facts))


@refuses
def select_attention_backends(
    model: nn.Module,
    cfg: CfgNode,
    device: torch.device,
    ranks: DistInfo,
    *,
    training: bool,
    folder: Path | None = None,
    begun: bool = False,
    say: Callable[[str], None] = log.info,
) -> None:
    """Who computes attention from here on, the same on every rank. See `build_backends.settle`."""
    asked = attention_cases(model, cfg, device, training=training, world=ranks.world)
    tune = training and cfg.MODEL.VIT.MSVIT.TUNE
    build_backends.settle(asked, ranks, folder=folder, begun=begun, tune=tune, say=say)
    if isinstance(model, PerImageDetector):
        build_backends.pin(network_in(model), asked)


@refuses
def load_model_path(model: nn.Module, cfg: CfgNode, *, whole: bool = False) -> str:
    """Load MODEL.MODEL_PATH; the line returned says which file it was and what became of its keys.

    whole: nothing may stay as it was initialised, so that a detector needs more than a backbone.

    It is looked for as it stands, then below DATA.DATA_DIR. The folder of a run, or the file `best`
    or `last` in it, stands for a checkpoint, and a checkpoint for its averaged weights where it has
    them (OPTIM.EMA).
    """
    path = weight_file(cfg.MODEL.MODEL_PATH, cfg.DATA.DATA_DIR)
    choices = dict(head=cfg.FINETUNE.HEAD, rule=cfg.FINETUNE.RESIZE)
    if cfg.DETECTION.MODEL:
        found = load_detector(model, path, **choices, whole=whole)
    else:
        found = load_weights(model, path, **choices)
    return f"weights of {path}: {found}"


def weight_file(given: str, data_dir: str) -> Path:
    """The file, or the folder of a checkpoint, that a path or a name of weights stands for."""
    if MEMBER.fullmatch(given) and not Path(given).exists():
        return get_weight(given).file()
    given = Path(given)
    places = list(dict.fromkeys((given, Path(data_dir, given))))
    path = next((place for place in places if place.exists()), None)
    if path is None:
        beside = f" (MODEL.MODEL_PATH), nor at {places[1]}" if len(places) > 1 else ""
        raise CheckpointError(f"no weights at {given}{beside}")
    if path.name in POINTERS and path.is_file():
        path = resolve_link(path.parent, path.name)
    elif (path / "config.yaml").is_file():
        path = resolve_link(path / "checkpoints", "best")
    if path is None:
        raise CheckpointError(f"the run in {given} has no checkpoint yet")
    if path.is_file() or (path / "config.json").is_file():  # a file, a folder of save_pretrained
        return find_weights(path)
    if reason := find_corruption(path):
        raise CheckpointError(
            f"{path} is damaged, or no checkpoint: {reason}; give the folder of a run, a "
            "checkpoint in it, or a file of weights"
        )
    return path / AVERAGE if (path / AVERAGE).is_file() else path


@refuses
def build_task(
    cfg: CfgNode,
    ranks: DistInfo,
    device: torch.device,
    test_loaders: dict,
    links: dict[str, Tensor] | None = None,
) -> Task:
    """The loss, the mixing and the evaluation. links: see `vil.build_data.build_links`."""
    build_detection.warn_of_settings(cfg)
    precision = dict(amp_dtype=amp_dtype(cfg), memory_format=MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT])
    if cfg.DETECTION.MODEL:
        return build_detection.task(cfg, device, test_loaders, **precision)
    mix = None
    if cfg.AUG.MIXUP_PROB > 0:
        mix = Mix(
            cfg.DATA.NUM_CLASSES,
            mixup_alpha=cfg.AUG.MIXUP,
            cutmix_alpha=cfg.AUG.MIXCUT,
            cutmix_minmax=tuple(cfg.AUG.MIXCUT_MINMAX) or None,
            prob=cfg.AUG.MIXUP_PROB,
            switch_prob=cfg.AUG.MIXUP_SWITCH_PROB,
            mode=cfg.AUG.MIXUP_MODE,
            label_smoothing=cfg.LOSS.LABEL_SMOOTHING,
            seed=cfg.SEED,
        )
    return ClassificationTask(
        device=device,
        test_loaders=test_loaders,
        classes=cfg.DATA.NUM_CLASSES,
        loss=_build_loss(cfg),
        label_smoothing=cfg.LOSS.LABEL_SMOOTHING,
        mix=mix and partial(mix, rank=ranks.rank),
        per_class=cfg.OUTPUT_PERCLASS_ACC,
        links=links,
        **precision,
    )


def _build_loss(cfg: CfgNode) -> Callable[[Tensor, Tensor], Tensor]:
    focal = cfg.LOSS.FOCAL
    if cfg.LOSS.LOSS != "focal":
        warn_unused(cfg, "LOSS.LOSS is not focal", ("LOSS.FOCAL",))
    return build_loss(
        cfg.LOSS.LOSS, alpha=focal.ALPHA, gamma=focal.GAMMA, normalize=focal.NORMALIZE
    )


@refuses
def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Groups with OPTIM.WD, and with OPTIM.WD0 norms, positions, tokens and the head's bias; each
    divided by layers if OPTIM.LAYER_DECAY is below 1."""
    optim = cfg.OPTIM
    if "ada" in optim.OPT and float(KEYS["OPTIM.LR"]) == optim.LR:
        log.warning("OPTIM.LR is %g, the default, which no recipe of %s has", optim.LR, optim.OPT)
    groups = decay_groups(
        model.named_parameters(),
        optim.WD,
        optim.WD0,
        model.no_weight_decay() if isinstance(model, MsViT) else find_no_decay_params(model),
        **(_layers(model) if optim.LAYER_DECAY < 1 else {}),
        layer_decay=optim.LAYER_DECAY,
    )
    return optimizer_by_name(
        optimizer_name(cfg),
        groups,
        lr=optim.LR,
        momentum=optim.MOM,
        nu=optim.NU,
        betas=(optim.ADAM.BETA1, optim.ADAM.BETA2),
        eps=optim.ADAM.EPS,
    )


def optimizer_name(cfg: CfgNode) -> str:
    """The row of OPTIMIZERS: sgd inside LARC is a row of its own."""
    return "larc" if cfg.SOLVER.USE_LARC else cfg.OPTIM.OPT


def _layers(model: nn.Module) -> dict[str, Any]:
    """How deep each parameter lies, for layer-wise decay."""
    if isinstance(model, MsViT | PerImageDetector):
        return {"layer_of": model.layer_of, "num_layers": model.num_layers}
    numbers = number_layers(model)
    return {"layer_of": numbers.__getitem__, "num_layers": max(numbers.values())}


def build_ema(cfg: CfgNode, model: nn.Module) -> Ema | None:
    """The average of the weights, if OPTIM.EMA asks for one."""
    return Ema(model, cfg.OPTIM.EMA) if cfg.OPTIM.EMA else None


@refuses
def spread(
    cfg: CfgNode, model: nn.Module, ema: Ema | None, ranks: DistInfo, device: torch.device
) -> None:
    """With DISTRIBUTED.STRATEGY fsdp and several processes: spread the model, and its average, over
    them. Before the optimizer is built, which holds the parameters that this replaces."""
    if cfg.DISTRIBUTED.STRATEGY != "fsdp" or ranks.world == 1:
        return
    if cfg.AMP.ENABLED and cfg.AMP.DTYPE == "float16":
        raise ConfigError("DISTRIBUTED.STRATEGY fsdp with float16: use AMP.DTYPE bfloat16")
    if optimizer_name(cfg) not in SPREAD_OPTIMIZERS:
        known = ", ".join(SPREAD_OPTIMIZERS)
        raise ConfigError(f"DISTRIBUTED.STRATEGY fsdp has {known}, not {optimizer_name(cfg)}")
    from vil.engine.fsdp import shard

    for each in (model, *([ema.model] if ema else [])):
        network = network_in(each)
        stages = network.stages if isinstance(network, MsViT) else ()
        shard(each, (block for stage in stages for block in stage.blocks), ranks, device)


def build_scaler(cfg: CfgNode, device: torch.device) -> GradScaler:
    """Scales the loss in float16, where small gradients would vanish; else does nothing."""
    return GradScaler(device.type, enabled=cfg.AMP.ENABLED and cfg.AMP.DTYPE == "float16")


@refuses
def build_schedule(cfg: CfgNode, steps_per_epoch: int) -> Schedule:
    """The learning rate of every step."""
    return Schedule(
        cfg.SOLVER.LR_POLICY,
        cfg.OPTIM.LR,
        steps_per_epoch,
        cfg.OPTIM.EPOCHS,
        warmup_epochs=cfg.SOLVER.WARMUP_EPOCHS,
        warmup_factor=cfg.SOLVER.WARMUP_FACTOR,
        warmup_method=cfg.SOLVER.WARMUP_METHOD,
        min_lr=cfg.SOLVER.MIN_LR,
        drop_freq=cfg.OPTIM.DROP_FREQ,
        drop_epochs=tuple(cfg.OPTIM.DROP_EPOCHS),
        drop_factor=cfg.OPTIM.DROP_FACTOR,
        epoch_based=cfg.SOLVER.EPOCH_BASED_SCHEDULE,
    )
