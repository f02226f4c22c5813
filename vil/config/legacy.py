"""Read configs of the original 2021 code. The files need no changes.

That code spells some values differently. vil converts these values. The code also added keys at
run time and saved them in its configs, and it has keys without effect. vil drops these keys. Each
change is logged as a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from vil.config.removed import RemovedKey
from vil.utils.errors import ConfigError

if TYPE_CHECKING:
    from vil.config.yaml_source import Setting

log = logging.getLogger(__name__)

# The original's names of longformer attention, and the backend of each.
LEGACY_ATTN_BACKENDS = {
    "longformerhand": "chunk_handgrad",
    "longformerauto": "chunk_autograd",
    "longformer_cuda": "triton",
}
# Written into the config while the original ran; it then could not read its own config.yaml.
RUNTIME_KEYS = ("distributed", "SOLVER.STEPS_PER_EPOCH", "SOLVER.MAX_ITER")
# Keys that have no effect in vil, with their defaults in the original code and the reasons.
IGNORED_KEYS = {
    "AUG.DROPBLOCK_LAYERS": RemovedKey([3, 4], "DropBlock is not implemented"),
    "AUG.DROPBLOCK_KEEP_PROB": RemovedKey(1.0, "DropBlock is not implemented"),
    "AUG.DROPBLOCK_BLOCK_SIZE": RemovedKey(7, "DropBlock is not implemented"),
    "AUG.MIXCUT_AND_MIXUP": RemovedKey(False, "AUG.MIXUP_SWITCH_PROB decides"),
    "AUG.TIMM_AUG.RE_SPLIT": RemovedKey(False, "timm does not receive it"),
    "DATALOADER.RE": RemovedKey("no", "nothing reads it"),
    "OPTIM.WARMUP": RemovedKey(0, "SOLVER.WARMUP_EPOCHS decides"),
    "OPTIM.TEST_FREQ": RemovedKey(1000, "RUN.EVAL_EVERY decides"),
    "MODEL.NONLINEARITY": RemovedKey("celu", "the networks fix their activations"),
    "MODEL.FREEZE_CONV_BODY_AT": RemovedKey(-1, "nothing reads it"),
    "BACKUP_LOG_DIR": RemovedKey("", "logs are written to OUTPUT_DIR"),
    "GATHER_ON_CPU": RemovedKey(False, "evaluation exchanges counts, not predictions"),
}
ONLY_SAVE_LAST = "ONLY_SAVE_LAST"  # if it is not 0, it sets RUN.KEEP to 1
SPELLINGS = {
    ("AMP.MEMORY_FORMAT", "nwhc"): "nhwc",
    ("AUG.MIXCUT_MINMAX", "None"): [],
    ("AUG.TIMM_AUG.AUTO_AUGMENT", "None"): "",
}


def modernise(settings: list[Setting], known: Callable[[str], bool]) -> list[Setting]:
    """Convert the settings of one file, or of the command line, to the current spellings.

    A file with any of RUNTIME_KEYS was saved by the original 2021 code, and its unknown keys are
    dropped with a warning. Other unknown keys are kept, so that `load_config` reports them. known:
    function that returns whether a key exists.
    """
    if any(setting.key in RUNTIME_KEYS for setting in settings):
        dropped = ", ".join(setting.key for setting in settings if not known(setting.key))
        source = settings[0].source
        log.warning(
            "%s was saved by the original 2021 code. vil ignores its unknown keys: %s",
            source,
            dropped,
        )
        settings = [setting for setting in settings if known(setting.key)]
    return [today for setting in settings for today in _respell(setting)]


def _respell(setting: Setting) -> list[Setting]:
    if setting.key == ONLY_SAVE_LAST:
        if not str(setting.value).isdecimal():
            raise ConfigError(
                f"{setting.where}: {setting.key}: expected an integer of at least 0, got "
                f"{setting.value!r:.80}"
            )
        return [setting._replace(key="RUN.KEEP", value="1")] if int(setting.value) else []
    if isinstance(setting.value, list | dict) or (setting.key, setting.value) not in SPELLINGS:
        return [setting]
    today = SPELLINGS[setting.key, setting.value]
    shown = today or "empty"
    log.warning(
        "%s: %s: the value %s is read as %s", setting.where, setting.key, setting.value, shown
    )
    return [setting._replace(value=today)]


def warn_revived(ln_eps: float, sources: dict[str, str]) -> None:
    """Log a warning if a config of the original 2021 code sets LN_EPS to a value other than 1e-6.

    The original code ignored LN_EPS, but vil applies it. A config without the key VERSION counts as
    one of the original code. sources: {key: source of its value} for all keys that are set.
    """
    key = "MODEL.VIT.MSVIT.LN_EPS"
    if "VERSION" not in sources and ln_eps != 1e-6:
        log.warning(
            "%s: %s: the original 2021 code ignored LN_EPS and used 1e-6. vil uses LN_EPS, "
            "but keeps 1e-6 for a model that loads weights of the original code.",
            sources[key],
            key,
        )
