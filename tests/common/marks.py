"""Marks of parametrized tests."""

import re
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

NEEDS_DETECTION = re.compile(r"DETECTION|detect|coco|scenes|boxes|retinanet|mine[./]")


def cases(
    values: Iterable,
    long: Container = (),
    text: Callable[[Any], str] = str,
    slow: Container = (),
) -> list:
    """The cases of a test: those in `long` and `slow` are marked so, and `detection` marks those
    whose text names that task, its configs or its files."""
    return [
        pytest.param(
            value,
            marks=[
                *([pytest.mark.long] if value in long else []),
                *([pytest.mark.slow] if value in slow else []),
                *([pytest.mark.detection] if NEEDS_DETECTION.search(text(value)) else []),
            ],
        )
        for value in values
    ]
