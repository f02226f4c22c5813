"""Keys that the config no longer has.

The configs of earlier runs contain them, and so may command lines that were written down. At its
former default, such a key is dropped silently. At another value, a warning says what to do instead.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vil.config.coercion import coerce

if TYPE_CHECKING:
    from vil.config.yaml_source import Setting

log = logging.getLogger(__name__)


class RemovedKey(NamedTuple):
    """A key without effect. note: what to do instead, or why it has no effect."""

    default: Any
    note: str


REMOVED = {
    "MULTILABEL.GAMMA_POS": RemovedKey(0.0, "the asymmetric loss uses the paper's value, 0"),
    "MULTILABEL.GAMMA_NEG": RemovedKey(4.0, "the asymmetric loss uses the paper's value, 4"),
    "MULTILABEL.CLIP": RemovedKey(0.05, "the asymmetric loss uses the paper's value, 0.05"),
    "REGRESSION.HUBER_DELTA": RemovedKey(
        1.0, "the Huber loss is linear above one standard deviation; see also REGRESSION.LOSS mae"
    ),
}


def drop_keys(
    settings: Sequence["Setting"], keys: Mapping[str, RemovedKey], title: str
) -> list["Setting"]:
    """Return the settings without those of `keys`. If any of these has another value than its
    former default, log one warning, which begins with `title` and lists them."""
    last = {setting.key: setting for setting in settings if setting.key in keys}
    changed = [
        f"{key} ({setting.where}): {keys[key].note}"
        for key, setting in last.items()
        if not _is_default(setting.value, keys[key].default)
    ]
    if changed:
        log.warning("%s: %s", title, ", ".join(changed))
    return [setting for setting in settings if setting.key not in keys]


def _is_default(value: Any, default: Any) -> bool:
    try:
        return coerce(value, default) == default
    except ValueError:
        return False
