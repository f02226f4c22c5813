"""Save and load optimizer state by parameter name instead of by index.

The state can therefore be loaded even if the parameter groups, the order of modules or the frozen
parameters have changed. Settings such as the learning rate are not saved: the config determines
them.

torch.distributed.checkpoint.state_dict is not used, because it restores saved settings and runs an
optimizer step to create missing state.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from vil.engine.fsdp import full_tensor, shard_like

# torch counts steps per parameter, but timm's lamb and apex count them per group, under this key.
# The count is saved as a number, because groups that share a tensor would increment it together.
STEP = "step"
STEP_OF_GROUP = "step of group"
MOMENTUM = "momentum_buffer"


def state_by_name(optimizer: Optimizer) -> dict[str, dict]:
    """Return the optimizer's state as {parameter name: {key: unsharded value}}.

    The names are those that `decay_groups` stored in the parameter groups. All ranks of a sharded
    model must call this.
    """
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
    """Load the result of `state_by_name`. Returns the names of parameters without saved state.

    Such parameters were frozen in the saved run. They get the state that `initial_state` returns.
    If the optimizer counts steps per parameter group, they use the saved count of their group.
    """
    current = optimizer.state_dict()
    current["state"], fresh = {}, []
    for group, own in zip(current["param_groups"], optimizer.param_groups):
        known = [saved[name] for name in group["param_names"] if name in saved]
        for index, name, parameter in zip(group["params"], group["param_names"], own["params"]):
            if name in saved:
                state = dict(saved[name])
            else:
                fresh.append(name)
                state = initial_state(known, parameter)
            if STEP_OF_GROUP in state:
                group[STEP] = state.pop(STEP_OF_GROUP)
            if state:
                current["state"][index] = {
                    key: shard_like(value, parameter) if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }
    optimizer.load_state_dict(current)  # torch moves every tensor to its parameter's device
    return fresh


def initial_state(known: list[dict], parameter: Tensor) -> dict:
    """Return the initial optimizer state of a parameter without saved state.

    known: saved states of the other parameters in the parameter's group. If any of them has a
    momentum, the initial state is a momentum of zeros, because torch's fused SGD needs a momentum
    for all parameters of a group or for none. Otherwise, it is an empty dict.
    """
    if any(state.keys() == {MOMENTUM} and state[MOMENTUM] is not None for state in known):
        return {MOMENTUM: torch.zeros_like(parameter)}
    return {}
