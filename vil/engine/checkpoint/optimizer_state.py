"""Save and load optimizer state by parameter name instead of by index.

The state can therefore be loaded even if the parameter groups, the order of modules or the frozen
parameters have changed. Settings such as the learning rate are not saved: the config determines
them.

torch.distributed.checkpoint.state_dict is not used, because it restores saved settings and runs an
optimizer step to create missing state.

A saved state is loaded only if it has the keys and shapes of a new state, because the compiled code
of an optimizer would write beyond the end of a smaller tensor.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

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
    Raises ValueError, before anything is loaded, if a saved state does not fit its parameter.

    Such parameters were frozen in the saved run. They get the state that `initial_state` returns.
    If the optimizer counts steps per parameter group, they use the saved count of their group.
    """
    check_states(optimizer, saved)
    current = optimizer.state_dict()
    current["state"], fresh = {}, []
    for group, own in zip(current["param_groups"], optimizer.param_groups):
        known = [saved[name] for name in group["param_names"] if name in saved]
        for index, name, parameter in zip(group["params"], group["param_names"], own["params"]):
            if name in saved:
                state = dict(saved[name])
                if all(value is None for value in state.values()):  # of damage, if not of all
                    state |= initial_state(known, parameter)
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


def check_states(optimizer: Optimizer, saved: dict[str, dict]) -> None:
    """Compare the result of `state_by_name` with new states of the same optimizer. Raises
    ValueError, which names the parameter, if a key is missing or a shape differs.

    A key that new states do not have, such as a momentum that is now 0, may have the shape of the
    parameter or a single value. A parameter may have no state at all.
    """
    for group, expected in zip(optimizer.param_groups, new_state_shapes(optimizer)):
        for name, parameter in zip(group["param_names"], group["params"]):
            if name not in saved:
                continue
            state = {
                key: value
                for key, value in saved[name].items()
                if key != STEP_OF_GROUP and value is not None
            }
            shapes = expected[parameter.shape]
            for key in shapes if state else ():
                if key not in state or shapes_in(state[key]) != shapes[key]:
                    given = shapes_in(state[key]) if key in state else "missing"
                    raise ValueError(f"{key} of {name} is {given}, expected {shapes[key]}")
            for key in state.keys() - shapes.keys():
                for value in filter(torch.is_tensor, tree_leaves(state[key])):
                    if value.numel() != 1 and value.shape != parameter.shape:
                        given = f"is {tuple(value.shape)}, expected {tuple(parameter.shape)}"
                        raise ValueError(f"{key} of {name} {given}")


def new_state_shapes(optimizer: Optimizer) -> list[dict[torch.Size, dict[str, Any]]]:
    """Return, for each parameter group, {shape of a parameter: shapes of its state after a step}.

    The step is one with other parameters of these shapes. The optimizer is not changed.
    """
    before, groups, states = dict(vars(optimizer)), [], defaultdict(dict)
    for group in optimizer.param_groups:
        named = {p.shape: (name, p) for name, p in zip(group["param_names"], group["params"])}
        names, params = [name for name, _ in named.values()], []
        for _, parameter in named.values():
            params.append(torch.ones_like(parameter).requires_grad_())
            params[-1].grad = torch.ones_like(parameter)
            if parameter in optimizer.state:  # Adagrad makes its states when it is built
                states[params[-1]] = copy.deepcopy(optimizer.state[parameter])
        groups.append({**group, "param_names": names, "params": params})
    caches = {key: copy.copy(value) for key, value in before.items() if isinstance(value, dict)}
    vars(optimizer).update(caches, param_groups=groups, state=states)
    try:
        with torch.random.fork_rng(devices=[]):
            optimizer.step()
        return [
            {p.shape: {key: shapes_in(v) for key, v in optimizer.state[p].items()} for p in params}
            for params in (group["params"] for group in optimizer.param_groups)
        ]
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(before)


def shapes_in(value: Any) -> Any:
    """Replace each tensor in nested lists and dicts by its shape. A number, like a tensor without
    dimensions, becomes ()."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape)
        return () if isinstance(leaf, int | float) else type(leaf).__name__

    return tree_map(shape, value)
