"""Divide the query chunks of a layout into groups that can be computed together.

In a group, all query chunks have the same number of key chunks. Query chunks that also have the
same displacements and masks, such as the interior of a local pattern, form a group of their own if
there are at least MIN_EQUAL of them. Such a group stores its displacements and its mask only once.

Shapes: Q chunks of W = w*w tokens, S displacements between chunks. In a group: P query chunks with
J key chunks each.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.layout import FULL, ChunkLists, Layout
from vil.utils.transforms import untraced

MIN_EQUAL = 4  # fewest query chunks with equal lists that form a separate group


class ListGroup(NamedTuple):
    """P query chunks with J key chunks each, which are computed together. A chunk has W tokens.

    head: the head that this group belongs to; None if all heads have the same pattern.
    queries (P,), keys (P, J): indices of the query chunks and of their key chunks.
    hidden (P or 1, W, J*W) bool: True where a query token must not attend to a key token; None if
    nothing is masked.
    steps (P or 1, J): the displacement (query chunk minus key chunk) of each key chunk, as an index
    into `Plan.steps`.
    The first dimension of hidden and steps is 1 if all query chunks have the same values.
    """

    head: int | None
    queries: Tensor
    keys: Tensor
    hidden: Tensor | None
    steps: Tensor


class Plan(NamedTuple):
    """The query chunks of a layout, divided into groups that are computed together.

    steps (S, 2): the distinct displacements, query chunk minus key chunk, in rows and columns of
    chunks.
    """

    groups: tuple[ListGroup, ...]
    steps: Tensor


@lru_cache(maxsize=64)
@untraced
def make_plan(layout: Layout, device: torch.device) -> Plan:
    """Divide the query chunks of a layout into groups that are computed together.

    device: the device of the groups' index tensors.
    """
    lists, (rows, cols) = layout.lists, layout.chunks
    steps, step = layout.steps()
    kinds = torch.stack([step, lists.mask], 1)
    sizes = (lists.head * rows * cols + lists.query).bincount(minlength=layout.heads * rows * cols)
    first = sizes.cumsum(0) - sizes
    groups = []
    for head, of_head in enumerate(sizes.split(rows * cols)):
        for num_keys in of_head.unique().tolist():
            queries = (of_head == num_keys).nonzero()[:, 0]
            pairs = first[head * rows * cols + queries, None] + torch.arange(num_keys)  # (P, J)
            for some, is_equal in _split_equal(kinds[pairs].flatten(1)):
                shared = pairs[some[:1]] if is_equal else pairs[some]
                hidden = _hidden_pairs(lists, shared)
                tensors = (queries[some], lists.key[pairs[some]], hidden, step[shared])
                tensors = (x if x is None else x.to(device) for x in tensors)
                groups.append(ListGroup(head if layout.heads > 1 else None, *tensors))
    return Plan(tuple(groups), steps)


def _hidden_pairs(lists: ChunkLists, pairs: Tensor) -> Tensor | None:
    """Return `ListGroup.hidden`, (P, W, J*W) bool; None if nothing is masked.

    lists: the chunk pairs (query chunk, key chunk) of a layout. pairs (P, J): for each of P query
    chunks, the indices in `lists` of its J chunk pairs.
    """
    masks = lists.mask[pairs]
    if (masks == FULL).all():
        return None
    hidden = torch.cat([~lists.masks, lists.masks.new_zeros(1, *lists.masks.shape[1:])])
    return hidden[masks].transpose(1, 2).flatten(2)  # FULL is the last


def _split_equal(kinds: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Group the equal rows of a matrix (P, n). Yields (row indices, whether the rows are equal).

    Rows that occur fewer than MIN_EQUAL times are yielded together as one last group of unequal
    rows.
    """
    if not kinds.shape[1]:  # chunks without keys
        yield torch.arange(len(kinds)), True
        return
    _, which, counts = kinds.unique(dim=0, return_inverse=True, return_counts=True)
    for kind in (counts >= MIN_EQUAL).nonzero()[:, 0].tolist():
        yield (which == kind).nonzero()[:, 0], True
    rest = (counts < MIN_EQUAL)[which].nonzero()[:, 0]
    if len(rest):
        yield rest, False
