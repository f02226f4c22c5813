"""Convert masks to and from COCO's run-length encoding (RLE), as numbers or a compressed string.

Run lengths count pixels column by column. The first run is of zeros. A compressed string stores the
first three run lengths as they are, and each later one as its difference from the run length two
places earlier. These numbers are in two's complement, with five bits per character, lowest bits
first. The ASCII code of a character is 48 + the five bits, + 32 if the number continues.

Unlike pycocotools and faster-coco-eval, `decompress_runs` rejects invalid strings.
"""

from collections.abc import Iterable

import numpy as np


def mask_to_runs(mask: np.ndarray) -> list[int]:
    """Convert a mask (H, W), nonzero on the object, to COCO's run lengths."""
    flat = np.concatenate([[False], np.asarray(mask, bool).ravel(order="F")])
    starts = np.flatnonzero(flat[1:] != flat[:-1])
    return np.diff([0, *starts, len(flat) - 1]).tolist()


def compress_runs(runs: Iterable[int]) -> str:
    """Encode run lengths as COCO's compressed string."""
    runs, characters = list(runs), []
    for i, run in enumerate(runs):
        rest = run - runs[i - 2] if i > 2 else run
        more = True
        while more:
            group, rest = rest & 31, rest >> 5
            more = rest != (-1 if group & 16 else 0)
            characters.append(chr(48 + group + 32 * more))
    return "".join(characters)


def decompress_runs(text: bytes) -> np.ndarray:
    """Decode COCO's compressed string to run lengths (n,) int64. Raises ValueError for an invalid
    string."""
    groups = np.frombuffer(text, np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(groups < 32) + 1
    if not len(ends) or groups.min() < 0 or groups.max() > 63 or ends[-1] != len(groups):
        raise ValueError("the string is not a valid COCO run-length encoding")
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    if lengths.max() > 7:
        raise ValueError("a run length is too large: more than 34 bits")
    offsets = np.arange(len(groups)) - starts.repeat(lengths)
    runs = np.add.reduceat((groups & 31) << 5 * offsets, starts)
    runs -= (groups[ends - 1] >> 4 & 1) << 5 * lengths
    runs[1::2], runs[2::2] = runs[1::2].cumsum(), runs[2::2].cumsum()
    return runs


def runs_to_mask(runs: np.ndarray, height: int, width: int) -> np.ndarray:
    """Convert run lengths (n,) to a mask (height, width) uint8 of zeros and ones. The run lengths
    must sum to height * width."""
    values = np.arange(len(runs), dtype=np.uint8) & 1
    return values.repeat(runs).reshape(width, height).T
