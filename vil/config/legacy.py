"""What the 2021 original wrote differently: names, spellings, and keys it added at run time.

Old files load as they are. Whatever is dropped or read differently is said in one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from yacs.config import CfgNode

if TYPE_CHECKING:
    from vil.config.yaml_source import Setting

log = logging.getLogger(__name__)

# The original's names of longformer attention, and the backend that each of them stood for.
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
    """The settings of one source, spelled as today and without keys that only the original had."""
    return [_respell(setting) for setting in _drop(settings, known)]


def _drop(settings: list[Setting], known: Callable[[str], bool]) -> list[Setting]:
    """A file with a runtime key was saved by some state of the original, so unknown keys in it are
    leftovers and not typing errors; in any other file they stay and are refused later."""
    if not any(setting.key in RUNTIME_KEYS for setting in settings):
        return settings
    dropped = [setting.key for setting in settings if not known(setting.key)]
    source = settings[0].where.rpartition(":")[0] or settings[0].where
    log.warning("%s was saved by the original code; keys dropped: %s", source, ", ".join(dropped))
    return [setting for setting in settings if known(setting.key)]


def _respell(setting: Setting) -> Setting:
    if isinstance(setting.value, list | dict) or (setting.key, setting.value) not in SPELLINGS:
        return setting
    today = SPELLINGS[setting.key, setting.value]
    said = today or "empty"
    log.warning("%s: %s: %s is read as %s", setting.where, setting.key, setting.value, said)
    return setting._replace(value=today)


def warn_revived(cfg: CfgNode, sources: dict[str, str]) -> None:
    """LN_EPS did nothing in the original, so a file of its time may hold any value."""
    key = "MODEL.VIT.MSVIT.LN_EPS"
    if "VERSION" not in sources and cfg.MODEL.VIT.MSVIT.LN_EPS != 1e-6:
        note = "the original ignored LN_EPS and used 1e-6; it is honoured here"
        log.warning("%s: %s: %s", sources[key], key, note)
