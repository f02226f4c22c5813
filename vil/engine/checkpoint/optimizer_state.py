"""An optimizer's state by parameter name, not by index.

So it survives another split into groups (weight decay, layer-wise rates), another order of modules
and newly frozen or unfrozen parts. The optimizer's settings are the config's, not the checkpoint's,
and the learning rate is a function of the step: neither is saved.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from vil.engine.fsdp import full_tensor, shard_like

# torch counts steps per parameter; timm's lamb and apex count them per group, under this name. Kept
# as a number: groups that share a tensor would count it up together.
STEP = "step"
STEP_OF_GROUP = "step of group"
MOMENTUM = "momentum_buffer"


def state_by_name(optimizer: Optimizer) -> dict[str, dict]:
    """Momenta and counters by parameter name (`decay_groups` gave the optimizer the names), whole:
    where they are spread over the ranks, all must ask."""
    return {
        name: {
            **{key: full_tensor(value) for key, value in optimizer.state[parameter].items()},
            **({STEP_OF_GROUP: int(group[STEP])} if STEP in group else {}),
        }
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"])
        if parameter in optimizer.state
    }


def load_by_name(optimizer: Optimizer, saved: dict[str, dict]) -> list[str]:
    """Undo `state_by_name`. Returns the parameters that the file does not know (newly unfrozen).

    They start afresh, but for a counter that their optimizer keeps for the whole group.
    """
    current = optimizer.state_dict()
    current["state"], fresh = {}, []
    groups = zip(current["param_groups"], optimizer.param_groups)
    for group, parameters in groups:
        rows = list(zip(group["params"], group["param_names"], parameters["params"]))
        known = [saved[name] for name in group["param_names"] if name in saved]
        for index, name, parameter in rows:
            if name not in saved:
                fresh.append(name)
            if state := dict(saved[name]) if name in saved else _beside(known, parameter):
                if STEP_OF_GROUP in state:
                    group[STEP] = state.pop(STEP_OF_GROUP)
                current["state"][index] = {
                    key: shard_like(value, parameter) if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }
    optimizer.load_state_dict(current)  # torch moves every tensor to its parameter's device
    return fresh


def _beside(known: list[dict], parameter: Tensor) -> dict:
    """A new parameter among known ones: torch's fused SGD wants momenta for all of a group or for
    none. Zeros are what it begins with."""
    only_momenta = any(
        state.keys() == {MOMENTUM} and state[MOMENTUM] is not None for state in known
    )
    return {MOMENTUM: torch.zeros_like(parameter)} if only_momenta else {}
