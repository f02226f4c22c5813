"""Look up keys: whether a key is known, and which key is most similar to an unknown one."""

import difflib

from vil.config.defaults import EXTENSIBLE, KEYS, SECTIONS
from vil.config.legacy import IGNORED_KEYS, ONLY_SAVE_LAST
from vil.config.removed import REMOVED

# {last name of a key in the configs of Swin or detectron2, or flag of timm: vil's key with the same
# meaning}
ALIASES = {
    "BASE_LR": "OPTIM.LR",
    "WEIGHT_DECAY": "OPTIM.WD",
    "BATCH_SIZE": "DATALOADER.BSZ",
    "IMS_PER_BATCH": "DATALOADER.BSZ",
    "NUM_WORKERS": "DATALOADER.WORKERS",
    "IMG_SIZE": "INPUT.IMAGE_SIZE",
    "DROP_PATH_RATE": "MODEL.VIT.DROP_PATH",
    "CUTMIX": "AUG.MIXCUT",
    "REPROB": "AUG.TIMM_AUG.RE_PROB",
    "WEIGHTS": "MODEL.MODEL_PATH",
    "ACCUMULATION_STEPS": "OPTIM.ACCUMULATE",
    "LEARNING_RATE": "OPTIM.LR",
    "MODEL": "MODEL.ARCH",
    "MODEL_EMA_DECAY": "OPTIM.EMA",
}


def is_known(key: str) -> bool:
    """Return whether a key is declared, was declared in an earlier version or in the 2021 code, or
    may be added to a section that accepts new keys.

    Returns False for a new key in such a section if it is very similar to a declared key, because
    it is probably a typing error.
    """
    if any(key in known for known in (KEYS, SECTIONS, REMOVED, IGNORED_KEYS, (ONLY_SAVE_LAST,))):
        return True
    node, _, name = key.rpartition(".")
    if node not in EXTENSIBLE or not name.isidentifier():
        return False
    declared = [last(key) for key in KEYS if key.startswith(f"{node}.")]
    return not any(similarity(name, other) >= 0.8 for other in declared)


def nearest(key: str) -> str | None:
    """Return the declared key that is most similar to `key`; None if no key is similar enough.

    ALIASES is used first: it has vil's key for names of Swin, detectron2 and timm. The part of
    `key` before its last dot does not matter then.
    """
    if last(key).upper() in ALIASES:
        return ALIASES[last(key).upper()]
    scores = {name: similarity(key, name) + similarity(last(key), last(name)) for name in KEYS}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] > 1 else None


def last(key: str) -> str:
    return key.rpartition(".")[2]


def similarity(given: str, name: str) -> float:
    return difflib.SequenceMatcher(None, given[:80].upper(), name, autojunk=False).ratio()
