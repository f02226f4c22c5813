"""Config differences allowed or rejected on resume."""

from pathlib import Path

from yacs.config import CfgNode

from vil.config import diff, get_config
from vil.utils.errors import CheckpointError

# Keys that weights, optimizer state and step count of the run depend on.
FIXED = (
    "MODEL",
    "INPUT.IMAGE_SIZE",
    "DATA.TRAIN",
    "DATA.NUM_CLASSES",
    "DATA.TARGETMAP",
    "DATALOADER.BSZ",
    "OPTIM.OPT",
    "OPTIM.ACCUMULATE",
    "SOLVER.USE_LARC",
    "AUG.REPEATED_AUG",
)
# Of these, keys that may change: how the model is computed and regularized, its initial weights.
FREE = (
    "MODEL.COMPILE",
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


def check_changes(cfg: CfgNode) -> list[str]:
    """A line per key that differs from the config of the run in OUTPUT_DIR.

    Raises CheckpointError if one of them must not change, unless RUN.ALLOW_CHANGES is set.
    """
    file, insists = Path(cfg.OUTPUT_DIR, "config.yaml"), cfg.RUN.ALLOW_CHANGES
    if not file.is_file():
        return []
    changed = diff(config_to_keep(cfg), get_config(file))
    fixed = [key for key in changed if within(key, FIXED) and not within(key, FREE)]
    if fixed and not insists:
        values = ", ".join(f"{key} {changed[key][1]!r} (now {changed[key][0]!r})" for key in fixed)
        raise CheckpointError(
            f"the run in {cfg.OUTPUT_DIR} was started with {values}: go back to it, start "
            "another run with MODEL.MODEL_PATH from this one, or try RUN.ALLOW_CHANGES True"
        )
    return [f"{key} is {now!r} from here, was {was!r}" for key, (now, was) in changed.items()]


def within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def config_to_keep(cfg: CfgNode) -> CfgNode:
    """The config that a run saves: absolute DATA.PATH, RUN.ALLOW_CHANGES back to False."""
    kept = cfg.clone()
    kept.defrost()
    if Path(kept.DATA.PATH).is_dir():
        kept.DATA.PATH = str(Path(kept.DATA.PATH).resolve())
    kept.RUN.ALLOW_CHANGES = False
    return kept
