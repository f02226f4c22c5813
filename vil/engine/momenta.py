"""An optimizer's state by parameter name, not by index.

So it survives another split into groups (weight decay, layer-wise rates), another order of modules
and newly frozen or unfrozen parts. The optimizer's settings are the config's, not the checkpoint's,
and the learning rate is a function of the step: neither is saved.
"""

from torch.optim import Optimizer

# torch counts steps per parameter; timm's lamb and apex count them per group, under this name. Kept
# as a number: groups that share a tensor would count it up together.
STEP = "step"
STEP_OF_GROUP = "step of group"


def state_by_name(optimizer: Optimizer) -> dict[str, dict]:
    """Momenta and counters by parameter name (`decay_groups` gave the optimizer the names)."""
    return {
        name: {
            **optimizer.state[parameter],
            **({STEP_OF_GROUP: int(group[STEP])} if STEP in group else {}),
        }
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"])
        if parameter in optimizer.state
    }


def load_by_name(optimizer: Optimizer, saved: dict[str, dict]) -> None:
    """Undo `state_by_name`. Parameters the file does not know start afresh (newly unfrozen)."""
    current = optimizer.state_dict()
    current["state"] = {}
    for group in current["param_groups"]:
        for index, name in zip(group["params"], group["param_names"]):
            if name in saved:
                state = dict(saved[name])
                if STEP_OF_GROUP in state:
                    group[STEP] = state.pop(STEP_OF_GROUP)
                current["state"][index] = state
    optimizer.load_state_dict(current)  # torch moves every tensor to its parameter's device
