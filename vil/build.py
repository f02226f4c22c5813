"""The bridge from a config to objects. Only here and in the commands is the config seen.

Each function reads the keys it needs and calls with explicit arguments. A setting that the objects
refuse becomes a ConfigError, so that every command ends with one line and the same exit code.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from yacs.config import CfgNode

from vil.config import HISTORIC, ConfigError
from vil.config.defaults import KEYS, leaves
from vil.data import build_dataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.mixup import Mix
from vil.data.transforms import eval_transform, train_transform
from vil.engine import distributed
from vil.engine.disk import damage
from vil.engine.distributed import Ranks
from vil.engine.state import pointer
from vil.engine.task import ClassificationTask
from vil.layers.attention.longformer import LongformerAttention
from vil.models.arch import parse_arch
from vil.models.checkpoint import Report, load_weights, read_weights
from vil.models.msvit import MsViT
from vil.ops import Case, choose
from vil.optim import Schedule, decay_groups
from vil.optim import build_optimizer as optimizer_by_name
from vil.utils.errors import CheckpointError
from vil.utils.table import lookup

# Keys of the tree whose feature is still to come: setting one is refused rather than ignored.
PENDING = (
    "AUG.REPEATED_AUG",
    "DATA.TARGETMAP",
    "LOSS.FOCAL.NORMALIZE",
    "LOSS.FOCAL.ALPHA",
    "LOSS.FOCAL.GAMMA",
    "OPTIM.NU",
    "OPTIM.VAL",
    "SOLVER.USE_LARC",
    "MODEL.PRETRAINED",
    "MODEL.VIT.MSVIT.SHARE_KV",
)
log = logging.getLogger(__name__)
AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
LOSSES = ("xentropy",)
ARCHS = ("msvit",)


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


def _refuse_pending(cfg: CfgNode) -> None:
    values = leaves(cfg)
    for key in PENDING:
        if values[key] != KEYS[key]:
            raise ConfigError(f"{key}: not available yet, leave it at {KEYS[key]!r}")


@refuses
def set_up(cfg: CfgNode) -> torch.device:
    """The device, with torch's global switches set."""
    torch.backends.cudnn.allow_tf32 = cfg.AMP.TF32
    torch.set_float32_matmul_precision("high" if cfg.AMP.TF32 else "highest")
    torch.autograd.set_detect_anomaly(cfg.SOLVER.DETECT_ANOMALY)
    if cfg.DETERMINISTIC:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return _device(cfg.DEVICE)


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


@contextmanager
def joined(cfg: CfgNode, device: torch.device) -> Iterator[Ranks]:
    """This process among those that torchrun started; it leaves their group at the end."""
    backend = {"cuda": cfg.DISTRIBUTED_BACKEND}.get(device.type)  # on a CPU gloo
    ranks = refuses(distributed.start)(backend, device)
    try:
        yield ranks
    finally:
        distributed.stop()


@refuses
def build_model(cfg: CfgNode) -> MsViT:
    """The network, freshly initialised from SEED."""
    _refuse_pending(cfg)
    lookup(dict.fromkeys(ARCHS), cfg.MODEL.ARCH, "MODEL.ARCH")
    vit, msvit = cfg.MODEL.VIT, cfg.MODEL.VIT.MSVIT
    attention = "longformer" if msvit.ATTN_TYPE in HISTORIC else msvit.ATTN_TYPE
    if msvit.ONLY_GLOBAL and attention == "longformer":
        attention = "global"
    backend = HISTORIC.get(msvit.ATTN_TYPE, msvit.BACKEND)
    stages = parse_arch(msvit.ARCH, attention)
    if not any("longformer" in stage.attention for stage in stages):
        _warn_unused(cfg, ("SW_EXACT", "MODE", "BACKEND"))
    own = {
        "longformer": dict(
            share_weights=msvit.SHARE_W,
            sw_exact=msvit.SW_EXACT,
            mode=msvit.MODE,
            mode_switch=msvit.VIL_MODE_SWITCH,
            backend=backend,
        ),
        "global": dict(share_weights=msvit.SHARE_W),
    }
    torch.manual_seed(cfg.SEED)
    return MsViT(
        stages,
        img_size=cfg.INPUT.IMAGE_SIZE,
        num_classes=cfg.DATA.NUM_CLASSES,
        drop_rate=vit.DROP,
        drop_path_rate=vit.DROP_PATH,
        norm_embed=vit.NORM_EMBED,
        norm_eps=msvit.LN_EPS,
        avg_pool=vit.AVG_POOL,
        pos_resize=vit.POS_RESIZE,
        attention_args=own,
        grad_checkpoint=cfg.MODEL.GRAD_CHECKPOINT,
    )


def _warn_unused(cfg: CfgNode, names: tuple[str, ...]) -> None:
    """Nothing is silent: settings of longformer attention that no stage has."""
    node = "MODEL.VIT.MSVIT"
    changed = [
        f"{node}.{name}" for name in names if cfg.MODEL.VIT.MSVIT[name] != KEYS[f"{node}.{name}"]
    ]
    if changed:
        log.warning("no stage has longformer attention, without effect: %s", ", ".join(changed))


@refuses
def place(model: MsViT, cfg: CfgNode, device: torch.device) -> MsViT:
    """The model on its device, in its memory format. Refuses a pinned backend that cannot run."""
    for _, attention, case in attention_cases(model, cfg, device):
        choose(case, attention.backend)
    return model.to(device, memory_format=MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT])


def attention_cases(
    model: MsViT, cfg: CfgNode, device: torch.device
) -> Iterator[tuple[int, LongformerAttention, Case]]:
    """What backends are asked for: stage number, its longformer attention, a case per mode."""
    dtype = AMP_DTYPES[cfg.AMP.DTYPE] if cfg.AMP.ENABLED else torch.float32
    facts = dict(batch=cfg.DATALOADER.BSZ, dtype=dtype, device=device.type)
    grids = model.grids((cfg.INPUT.IMAGE_SIZE,) * 2)
    for number, (stage, grid) in enumerate(zip(model.stages, grids), start=1):
        kinds = {type(block.attn): block.attn for block in stage.blocks}
        if attention := kinds.get(LongformerAttention):
            for mode in attention.modes():
                yield number, attention, attention.case(grid, mode, **facts)


@refuses
def load_model_path(model: MsViT, cfg: CfgNode) -> Report:
    """Load MODEL.MODEL_PATH and say what became of every key.

    It is looked for as it stands, then below DATA.DATA_DIR; the folder of a run stands for its
    best checkpoint.
    """
    given = Path(cfg.MODEL.MODEL_PATH)
    places = (given, Path(cfg.DATA.DATA_DIR, given))
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise CheckpointError(f"no weights at {places[0]} (MODEL.MODEL_PATH), nor at {places[1]}")
    path = pointer(path / "checkpoints", "best") or path
    if path.is_dir() and (reason := damage(path)):
        raise CheckpointError(f"{path} is damaged: {reason}")
    return load_weights(model, read_weights(path), head=cfg.FINETUNE.HEAD)


@refuses
def build_train_loader(
    cfg: CfgNode, ranks: Ranks, device: torch.device, bad_file: Path | None = None
) -> TrainLoader:
    """The training batches of one rank; DATALOADER.BSZ counts the images of all ranks."""
    if len(cfg.DATA.TRAIN) > 1:
        raise ConfigError("DATA.TRAIN: several training sets at once are not available yet")
    size = cfg.DATALOADER.BSZ
    if size % ranks.world:
        raise ConfigError(f"DATALOADER.BSZ {size} does not divide by the {ranks.world} processes")
    dataset = _dataset(cfg, cfg.DATA.TRAIN[0], "train", _train_transform(cfg))
    return TrainLoader(
        dataset,
        batch_size=size // ranks.world,
        seed=cfg.SEED,
        rank=ranks.rank,
        world=ranks.world,
        bad_file=bad_file,
        **_loading(cfg, device),
    )


@refuses
def build_test_loaders(
    cfg: CfgNode, ranks: Ranks, device: torch.device, bad_file: Path | None = None
) -> dict[str, EvalLoader]:
    """The test sets by name, each rank its own part."""
    if len(set(cfg.DATA.TEST)) < len(cfg.DATA.TEST):
        raise ConfigError(f"DATA.TEST names a set twice: {', '.join(cfg.DATA.TEST)}")
    size = -(-cfg.DATALOADER.BSZ // ranks.world)
    transform = eval_transform(
        cfg.INPUT.IMAGE_SIZE, crop_pct=cfg.INPUT.CROP_PCT, **_normalisation(cfg)
    )
    return {
        name: EvalLoader(
            _dataset(cfg, name, "val", transform),
            batch_size=size,
            rank=ranks.rank,
            world=ranks.world,
            bad_file=bad_file,
            **_loading(cfg, device),
        )
        for name in cfg.DATA.TEST
    }


def _loading(cfg: CfgNode, device: torch.device) -> dict[str, Any]:
    return dict(
        workers=cfg.DATALOADER.WORKERS,
        pin_memory=device.type == "cuda",
        max_bad_fraction=cfg.DATA.MAX_BAD_FRACTION,
    )


def _dataset(cfg: CfgNode, name: str, split: str, transform: Callable):
    try:
        dataset = build_dataset(name, cfg.DATA.PATH, split, transform, **cfg.DATA.KWARGS)
    except TypeError as error:  # a name or a type that the dataset does not take
        raise ConfigError(f"DATA.KWARGS {dict(cfg.DATA.KWARGS)} for {name}: {error}") from error
    if len(dataset.classes) != cfg.DATA.NUM_CLASSES:
        raise ConfigError(
            f"DATA.NUM_CLASSES is {cfg.DATA.NUM_CLASSES}, "
            f"but {name} has {len(dataset.classes)} classes"
        )
    return dataset


def _normalisation(cfg: CfgNode) -> dict[str, Any]:
    return dict(
        mean=cfg.INPUT.MEAN,
        std=cfg.INPUT.STD,
        interpolation=INTERPOLATIONS[cfg.INPUT.INTERPOLATION],
    )


def _train_transform(cfg: CfgNode) -> Callable:
    timm, aug = cfg.AUG.TIMM_AUG, cfg.AUG
    by_timm = dict(
        use_timm=True,
        hflip=timm.HFLIP,
        vflip=timm.VFLIP,
        color_jitter=timm.COLOR_JITTER,
        auto_augment=timm.AUTO_AUGMENT or None,
        re_prob=timm.RE_PROB,
        re_mode=timm.RE_MODE,
        re_count=timm.RE_COUNT,
    )
    plain = dict(
        finetune=cfg.FINETUNE.FINETUNE and not cfg.FINETUNE.USE_TRAIN_AUG,
        crop_pct=cfg.INPUT.CROP_PCT,
        color_jitter=aug.COLOR_JITTER,
        gray_scale=aug.GRAY_SCALE,
        gaussian_blur=aug.GAUSSIAN_BLUR,
    )
    return train_transform(
        cfg.INPUT.IMAGE_SIZE,
        scale=tuple(aug.SCALE),
        ratio=tuple(aug.RATIO),
        **_normalisation(cfg),
        **(by_timm if timm.USE_TRANSFORM else plain),
    )


@refuses
def build_task(
    cfg: CfgNode, ranks: Ranks, device: torch.device, test_loaders: dict
) -> ClassificationTask:
    """The loss, the mixing and the evaluation."""
    lookup(dict.fromkeys(LOSSES), cfg.LOSS.LOSS, "LOSS.LOSS")
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
        label_smoothing=cfg.LOSS.LABEL_SMOOTHING,
        mix=mix and partial(mix, rank=ranks.rank),
        amp_dtype=AMP_DTYPES[cfg.AMP.DTYPE] if cfg.AMP.ENABLED else None,
        memory_format=MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT],
        per_class=cfg.OUTPUT_PERCLASS_ACC,
    )


@refuses
def build_optimizer(cfg: CfgNode, model: MsViT) -> Optimizer:
    """Two groups: with OPTIM.WD; norms, positions, tokens and the head's bias with OPTIM.WD0."""
    groups = decay_groups(
        model.named_parameters(), cfg.OPTIM.WD, cfg.OPTIM.WD0, model.no_weight_decay()
    )
    return optimizer_by_name(
        cfg.OPTIM.OPT,
        groups,
        lr=cfg.OPTIM.LR,
        momentum=cfg.OPTIM.MOM,
        betas=(cfg.OPTIM.ADAM.BETA1, cfg.OPTIM.ADAM.BETA2),
        eps=cfg.OPTIM.ADAM.EPS,
    )


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
        drop_factor=cfg.OPTIM.DROP_FACTOR,
        epoch_based=cfg.SOLVER.EPOCH_BASED_SCHEDULE,
    )
