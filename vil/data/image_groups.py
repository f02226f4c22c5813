"""Group images that must be in the same split: identical images, and images to which the dataset
gives the same group number."""

import hashlib
import logging

import numpy as np

from vil.data.dataset import ImageDataset
from vil.data.splits import join_groups, number_keys
from vil.utils.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_COMPARED = 50_000  # images that "auto" reads to find identical ones


def group_samples(dataset: ImageDataset, group_by: str, name: str) -> np.ndarray:
    """Return the group number (N,) int64 of each sample.

    group_by: "column" groups by the dataset's `split_groups`, "content" groups identical images,
    "auto" combines both, and "none" makes no groups. "auto" compares no images if there are more
    than MAX_COMPARED. name: the dataset's name in messages. Raises ConfigError for "column" if the
    dataset has no groups.
    """
    count, keys = len(dataset), []
    if group_by in ("column", "auto") and dataset.split_groups is not None:
        keys.append(dataset.split_groups)
    elif group_by == "column":
        raise ConfigError(
            f"DATA.GROUP_BY is 'column', but {name} has no group column: use 'auto' or 'content'"
        )
    if group_by == "content" or (group_by == "auto" and count <= MAX_COMPARED):
        keys.append(number_keys([_content_hash(dataset, index) for index in range(count)]))
    elif group_by == "auto":
        text = "%s has %d images. More than %d images are not compared, so identical images may be "
        text += "in different splits: to compare all images, set DATA.GROUP_BY to content"
        logger.warning(text, name, count, MAX_COMPARED)
    return join_groups(*keys) if keys else np.arange(count)


def _content_hash(dataset: ImageDataset, index: int) -> bytes | None:
    try:
        return hashlib.blake2b(dataset.content(index), digest_size=16).digest()
    except OSError:
        return None  # an unreadable image equals no other
