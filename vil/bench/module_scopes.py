"""Which module an operation belongs to, in the forward pass and in the backward.

Autograd numbers what it records. Each call of a module spans a range of these numbers, and a node
of the backward pass bears the number of the operation it differentiates.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn


class Places:
    """`with Places(model) as places:` knows at any moment where the model is.

    Modules go by their names; of a block's number no notice is taken, so that equal blocks of a
    stage add up: `stages.2.blocks.*.mlp.fc1`. What belongs to no part is the model's: `(model)`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack = ["(model)"]
        self.begun: list[int] = []
        self.spans: list[tuple[int, int, str]] = []  # inner modules before those around them
        self.hooks: list[Any] = []

    def __enter__(self) -> Places:
        for name, module in self.model.named_modules():
            if name:
                place = re.sub(r"(?<=\bblocks\.)\d+", "*", name)
                self.hooks.append(
                    module.register_forward_pre_hook(lambda *_, place=place: self._enter(place))
                )
                self.hooks.append(module.register_forward_hook(lambda *_: self._leave()))
        return self

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()

    @property
    def now(self) -> tuple[str, str]:
        """The innermost module at work, and `forward` or `backward`."""
        node = torch._C._current_autograd_node()
        if node is None or len(self.stack) > 1:  # or a block is computed once more, to save memory
            return self.stack[-1], "forward"
        return self.of_number(node._sequence_nr()), "backward"

    def of_number(self, number: int) -> str:
        """The module whose call recorded the operation of that number."""
        return next(
            (place for begin, end, place in self.spans if begin <= number < end), self.stack[0]
        )

    def _enter(self, place: str) -> None:
        self.stack.append(place)
        self.begun.append(torch.autograd._get_sequence_nr())

    def _leave(self) -> None:
        span = (self.begun.pop(), torch.autograd._get_sequence_nr())
        self.spans.append((*span, self.stack.pop()))
