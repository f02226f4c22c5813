"""Check which config keys may change when a run resumes, and make the config that a run saves."""

from pathlib import Path

from torch import nn
from yacs.config import CfgNode

from vil.config import diff, override
from vil.config.defaults import leaves, tree
from vil.config.yaml_source import from_mapping
from vil.integrations.external_models import preprocessing
from vil.layers.attention import ATTENTIONS
from vil.models.vision_longformer import MsViT
from vil.tasks import TASKS
from vil.utils.errors import CheckpointError

# Keys whose value "auto" is resolved when weights are loaded.
RULES = ("MODEL.VIT.MSVIT.SR_RAGGED", "MODEL.VIT.MSVIT.PERFORMER_BATCH_MAX")
# Keys and sections that the run's weights, optimizer state or step count depend on.
FIXED = (
    "MODEL",
    "INPUT.IMAGE_SIZE",
    "INPUT.CHANNELS",
    "DATA.TRAIN",
    "DATA.VAL",
    "DATA.VAL_FRACTION",
    "DATA.TEST_FRACTION",
    "DATA.FOLDS",
    "DATA.FOLD",
    "DATA.SPLIT_SEED",
    "DATA.GROUP_BY",
    "DATA.NUM_CLASSES",
    "DATA.TARGETMAP",
    "DATALOADER.BSZ",
    "OPTIM.OPT",
    "DATALOADER.SAMPLER",
    "OPTIM.ACCUMULATE",
    "SOLVER.USE_LARC",
    "AUG.REPEATED_AUG",
)
# Exceptions to FIXED: how the model is computed and regularized, and its initial weights.
FREE = (
    "MODEL.COMPILE",
    "MODEL.COMPILE_MODE",
    "MODEL.GRAD_CHECKPOINT",
    "MODEL.MODEL_PATH",
    "MODEL.PRETRAINED",
    "MODEL.VIT.DROP",
    "MODEL.VIT.DROP_PATH",
    "MODEL.VIT.MSVIT.BACKEND",
    "MODEL.VIT.MSVIT.TUNE",
    "MODEL.VIT.MSVIT.MODE",
    "MODEL.VIT.MSVIT.VIL_MODE_SWITCH",
)


def adopt_saved(cfg: CfgNode, saved: CfgNode) -> tuple[CfgNode, list[str]]:
    """Replace unresolved values of the config by those in `saved`, the config that the run in
    OUTPUT_DIR saved, and compare the two. Returns the new config, and a line of text per changed
    key.

    Unresolved values are "auto" for the keys in RULES, () for keys that the task derives from the
    training set, and the image preprocessing that comes with MODEL.PRETRAINED. Raises
    CheckpointError if a key that must not change differs and RUN.ALLOW_CHANGES is not set.
    """
    now, before = leaves(cfg), leaves(saved)
    open_keys = [key for key in RULES if now[key] == "auto"]
    learned = TASKS.entry(cfg.TASK).load().learned_keys
    open_keys += [key for key in learned if not now[key]]
    if cfg.MODEL.PRETRAINED:
        published = preprocessing(cfg.MODEL.ARCH, cfg.INPUT.CHANNELS)
        open_keys += [key for key, value in published.items() if now[key] == value]
    cfg = override(cfg, list(from_mapping({key: before[key] for key in open_keys})))
    changed = diff(config_to_keep(cfg), saved)
    fixed = [key for key in changed if within(key, FIXED) and not within(key, FREE)]
    if fixed and not cfg.RUN.ALLOW_CHANGES:
        values = ", ".join(f"{key} {changed[key][1]!r} (now {changed[key][0]!r})" for key in fixed)
        raise CheckpointError(
            f"the run in {cfg.OUTPUT_DIR} was started with {values}: restore these values, "
            "start a new run with MODEL.MODEL_PATH set to a checkpoint of the old run, or set "
            "RUN.ALLOW_CHANGES to True to try to resume with the new values"
        )
    return cfg, [f"{key} is {now!r} from here, was {was!r}" for key, (now, was) in changed.items()]


def within(key: str, names: tuple[str, ...]) -> bool:
    """Return whether `names` includes the config key, or a section that contains the key."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def fixed_values(cfg: CfgNode) -> dict[str, str]:
    """Return {config key: value as text} of the keys that must not change when a run resumes. A
    checkpoint has a copy, because config.yaml may be edited. cfg: result of `config_to_keep`."""
    values = leaves(cfg).items()
    return {k: repr(value) for k, value in values if within(k, FIXED) and not within(k, FREE)}


def config_to_keep(cfg: CfgNode, model: nn.Module | None = None) -> CfgNode:
    """Return a copy of the config as a run saves it.

    DATA.PATH is made absolute if it is a folder, and so are DISTILL.CACHE and paths of a teacher.
    RUN.ALLOW_CHANGES is set to False. If `model` is given, the LayerNorm epsilon and the keys in
    RULES get the values that the model uses. They may differ from the config, because they can
    depend on the model's initial weights.
    """
    kept = leaves(cfg)
    network = next((m for m in model.modules() if isinstance(m, MsViT)), None) if model else None
    if network is not None:
        kept["MODEL.VIT.MSVIT.LN_EPS"] = network.settings["norm_eps"]
        for name, arguments in (network.settings["attention_args"] or {}).items():
            for argument, key in ATTENTIONS[name].key_names.items():
                if key in RULES:
                    kept[key] = str(arguments[argument])
    if Path(cfg.DATA.PATH).is_dir():
        kept["DATA.PATH"] = str(Path(cfg.DATA.PATH).resolve())
    for key in ("DISTILL.TEACHER", "DISTILL.WEIGHTS", "DISTILL.CACHE"):
        # other values are names; the folder of the cache is created later
        if kept[key] and (Path(kept[key]).exists() or key == "DISTILL.CACHE"):
            kept[key] = str(Path(kept[key]).resolve())
    kept["RUN.ALLOW_CHANGES"] = False
    return tree(kept)
