"""Bitmaps as run lengths, in COCO's two spellings: a list of numbers and a compressed string.

The runs go down the columns, the first one is of zeros. In the string a number is its difference to
the last but one before it (from the fourth on), in groups of five bits, the lowest first; bit 5
says that more follow, the last group's bit 4 is the sign, and 48 is added to make it a character.
"""

from collections.abc import Iterable

import numpy as np


def mask_to_runs(bitmap: np.ndarray) -> list[int]:
    """The run lengths of a bitmap (H, W) of zeros and others."""
    flat = np.concatenate([[False], np.asarray(bitmap, bool).ravel(order="F")])
    starts = np.flatnonzero(flat[1:] != flat[:-1])
    return np.diff([0, *starts, len(flat) - 1]).tolist()


def compress_runs(runs: Iterable[int]) -> str:
    """The string of run lengths."""
    runs, characters = list(runs), []
    for at, run in enumerate(runs):
        rest = run - runs[at - 2] if at > 2 else run
        more = True
        while more:
            group, rest = rest & 31, rest >> 5
            more = rest != (-1 if group & 16 else 0)
            characters.append(chr(48 + group + 32 * more))
    return "".join(characters)


def decompress_runs(text: bytes) -> np.ndarray:
    """The run lengths (n,) int64 that a string spells. ValueError for what is no such string."""
    groups = np.frombuffer(text, np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(groups < 32) + 1
    if not len(ends) or groups.min() < 0 or groups.max() > 63 or ends[-1] != len(groups):
        raise ValueError("no string of run lengths")
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    if lengths.max() > 7:
        raise ValueError("a run length of more than 34 bits")
    places = np.arange(len(groups)) - starts.repeat(lengths)
    runs = np.add.reduceat((groups & 31) << 5 * places, starts)
    runs -= (groups[ends - 1] >> 4 & 1) << 5 * lengths
    runs[1::2], runs[2::2] = runs[1::2].cumsum(), runs[2::2].cumsum()
    return runs


def runs_to_mask(runs: np.ndarray, height: int, width: int) -> np.ndarray:
    """(height, width) uint8 of runs that add up to its pixels."""
    values = np.arange(len(runs), dtype=np.uint8) & 1
    return values.repeat(runs).reshape(width, height).T
