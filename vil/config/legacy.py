"""Read configs of the original 2021 code. The files need no changes.

That code spells some values differently. vil converts these values. The code also added keys at
run time and saved them in its configs. vil drops these keys. Each change is logged as a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from yacs.config import CfgNode

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
    return [_respell(setting) for setting in settings]


def _respell(setting: Setting) -> Setting:
    if isinstance(setting.value, list | dict) or (setting.key, setting.value) not in SPELLINGS:
        return setting
    today = SPELLINGS[setting.key, setting.value]
    shown = today or "empty"
    log.warning(
        "%s: %s: the value %s is read as %s", setting.where, setting.key, setting.value, shown
    )
    return setting._replace(value=today)


def warn_revived(cfg: CfgNode, sources: dict[str, str]) -> None:
    """Log a warning if a config of the original 2021 code sets LN_EPS to a value other than 1e-6.

    The original code ignored LN_EPS, but vil applies it. A config without the key VERSION counts as
    one of the original code. sources: {key: source of its value} for all keys that are set.
    """
    key = "MODEL.VIT.MSVIT.LN_EPS"
    if "VERSION" not in sources and cfg.MODEL.VIT.MSVIT.LN_EPS != 1e-6:
        log.warning(
            "%s: %s: the original 2021 code ignored LN_EPS and used 1e-6. vil uses LN_EPS, "
            "but keeps 1e-6 for a model that loads weights of the original code.",
            sources[key],
            key,
        )
