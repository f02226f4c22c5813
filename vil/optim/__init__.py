"""Registries of optimizers and learning-rate schedules. Importing vil.optim does not import torch.

OPTIMIZERS  {name: function that builds the optimizer}, see `register_optimizer` and optimizers.py.
            The names timm/<name> are the optimizers of timm, see timm_optimizers.py.
SCHEDULES   {name: function that computes the learning rate}, see `register_schedule` and
            schedules.py.

Most built-in optimizers add weight decay to the gradient (L2 regularization). adamw has decoupled
weight decay. lamb and apex_lamb add weight decay to the update.
"""

from collections.abc import Callable, Mapping

from vil.utils.lazy import lazy_exports
from vil.utils.registry import Key, Registry

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Ema": "vil.optim.ema",
        "Schedule": "vil.optim.schedules",
        "Settings": "vil.optim.optimizers",
        "build_optimizer": "vil.optim.optimizers",
        "decay_groups": "vil.optim.param_groups",
    },
)
__all__ += ["OPTIMIZERS", "SCHEDULES", "register_optimizer", "register_schedule"]

# can_shard: the update is correct for parameters that FSDP shards.
# drops_on_plateau: OPTIM.VAL may lower the learning rate when the metric stops improving.
# refused: why training cannot use the optimizer, if it cannot.
_AT = "vil.optim.optimizers"
OPTIMIZERS = Registry(
    "optimizer",
    check="vil.optim.contracts:check_optimizer",
    libraries={"timm/": "vil.optim.timm_optimizers:timm_entries"},
)
OPTIMIZERS.add("adamw", f"{_AT}:adamw", "Adam with decoupled weight decay", can_shard=True)
OPTIMIZERS.add("adam", f"{_AT}:adam", "Adam", can_shard=True)
OPTIMIZERS.add("sgd", f"{_AT}:sgd", "SGD with momentum", can_shard=True, drops_on_plateau=True)
OPTIMIZERS.add("lamb", f"{_AT}:lamb", "layer-wise adaptive Adam", can_shard=True)
OPTIMIZERS.add("lars", f"{_AT}:lars", "layer-wise adaptive SGD")
OPTIMIZERS.add("larc", f"{_AT}:larc", "LARS, clipped at the learning rate")
OPTIMIZERS.add("qhm", f"{_AT}:qhm", "quasi-hyperbolic momentum", drops_on_plateau=True)
OPTIMIZERS.add("apex_lamb", f"{_AT}:apex_lamb", "NVIDIA apex's fused LAMB")
OPTIMIZERS.add("apex_adam", f"{_AT}:apex_adam", "NVIDIA apex's fused Adam")

SCHEDULES = Registry("learning-rate schedule", check="vil.optim.contracts:check_schedule")
SCHEDULES.add("", "vil.optim.schedules:constant", "constant, without warm-up")
SCHEDULES.add("multistep", "vil.optim.schedules:multistep", "divided by a factor at given epochs")
SCHEDULES.add("cosine", "vil.optim.schedules:cosine", "cosine decay to SOLVER.MIN_LR")
SCHEDULES.add("linear", "vil.optim.schedules:linear", "linear decay to SOLVER.MIN_LR")


def register_optimizer(
    name: str,
    build: Callable | str,
    *,
    keys: Mapping[str, str | Key] | None = None,
    can_shard: bool = False,
    about: str = "",
) -> None:
    """Register an optimizer under a name for the config key OPTIM.OPT.

    build: a function build(groups, settings, **arguments) that returns a torch Optimizer, or its
    location as a string "module:function", which is imported on first use. The function must pass
    `groups` (from `decay_groups`) to the optimizer unchanged. `settings` is a `Settings`.
    keys: {keyword argument of `build`: config key that sets it}.
    can_shard: whether the optimizer also works with parameters that FSDP shards.
    about: one-line description for lists of optimizers.

    Raises ValueError if the name is taken or a test step with two small parameters fails.
    """
    OPTIMIZERS.register(name, build, about, keys=keys, can_shard=can_shard)


def register_schedule(
    name: str,
    function: Callable | str,
    *,
    keys: Mapping[str, str | Key] | None = None,
    about: str = "",
) -> None:
    """Register a learning-rate schedule under a name for the config key SOLVER.LR_POLICY.

    function: a function(schedule, time, **arguments) that returns the learning rate, or its
    location as a string "module:function", which is imported on first use. `schedule` is a
    `Schedule`. `time` is the epoch if `schedule.epoch_based` is True, else the step.
    keys: {keyword argument of `function`: config key that sets it}.
    about: one-line description for lists of schedules.

    Raises ValueError if the name is taken or if the function cannot be called as above.
    """
    SCHEDULES.register(name, function, about, keys=keys)
