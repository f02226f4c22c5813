"""Find the module that an operation belongs to, in the forward and the backward pass.

Operations are identified by their autograd sequence number. A backward operation has the same
number as its forward operation.
"""

import re
from typing import Any

import torch
from torch import nn

OUTSIDE = "(model)"  # name for operations outside any submodule


class ModuleScopes:
    """Context manager that tracks which submodule of a model is running.

    In module names, block numbers are replaced by "*", as in `stages.2.blocks.*.mlp.fc1`, so that
    all blocks of a stage have the same names and their costs can be summed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack: list[tuple[str, int]] = []  # running modules, and the number at their start
        self.spans: list[tuple[int, int, str]] = []  # inner modules before outer ones
        self.hooks: list[Any] = []

    def __enter__(self) -> "ModuleScopes":
        for path, module in self.model.named_modules():
            if path:
                name = re.sub(r"(?<=\bblocks\.)\d+", "*", path)
                enter = module.register_forward_pre_hook(lambda *_, name=name: self.enter(name))
                self.hooks += [enter, module.register_forward_hook(lambda *_: self.leave())]
        return self

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()

    @property
    def current(self) -> tuple[str, str]:
        """The module and the pass of the running operation, as (module name, "forward" or
        "backward")."""
        node = torch._C._current_autograd_node()
        if self.stack:  # also true while gradient checkpointing recomputes a block
            return self.stack[-1][0], "forward"
        return (OUTSIDE, "forward") if node is None else self.of_backward(node._sequence_nr())

    def of_backward(self, number: int) -> tuple[str, str]:
        """Find the module of a backward operation. Returns (module name, "backward"). number: the
        operation's autograd sequence number."""
        inside = (name for begin, end, name in self.spans if begin <= number < end)
        return next(inside, OUTSIDE), "backward"

    def enter(self, name: str) -> None:
        self.stack.append((name, torch.autograd._get_sequence_nr()))

    def leave(self) -> None:
        name, begin = self.stack.pop()
        # the operations in a call of a module have consecutive numbers
        self.spans.append((begin, torch.autograd._get_sequence_nr(), name))
