"""Optimizers and learning-rate schedules by name. Importing this package does not import torch.

OPTIMIZERS  name -> build(groups, settings, **own) (optimizers.py)
SCHEDULES   name -> function(schedule, time, **own) (schedules.py), pure functions of the step

Weight decay is added to the gradient (L2), except in adamw, which shrinks the weights directly, and
in lamb and apex_lamb, which add it to the update.
"""

import inspect
from collections.abc import Callable, Mapping

from vil.utils.lazy import lazy_exports
from vil.utils.registry import Entry, Key, Registry

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Ema": "vil.optim.ema",
        "Schedule": "vil.optim.schedules",
        "Settings": "vil.optim.optimizers",
        "build_optimizer": "vil.optim.build",
        "decay_groups": "vil.optim.param_groups",
    },
)
__all__ += ["OPTIMIZERS", "SCHEDULES", "register_optimizer", "register_schedule"]


def check_optimizer(build: Callable, entry: Entry) -> None:
    """Raise ValueError unless `build` returns an optimizer that trains and can be saved.

    It is tried with the defaults of the keys that it adds: an argument that an existing key of the
    config sets needs a default of its own.
    """
    from vil.optim.contracts import try_optimizer

    own = {a: key.default for a, key in entry.keys.items() if isinstance(key, Key)}
    try_optimizer(entry.name, build, own)


def check_schedule(function: Callable, entry: Entry) -> None:
    """Raise ValueError unless `function` takes a Schedule, a time and its own arguments."""
    own = dict.fromkeys(entry.keys)
    try:
        inspect.signature(function).bind(None, 0, **own)
    except (TypeError, ValueError) as error:
        called = ", ".join(["schedule", "time", *(f"{argument}=..." for argument in own)])
        raise ValueError(f"schedule {entry.name!r} is called as f({called}): {error}") from error


# can_shard: the update is correct for parameters that FSDP shards.
# drops_on_plateau: OPTIM.VAL may lower the learning rate when the metric stalls.
# adaptive: Adam's update, for which the default of OPTIM.LR is too large.
OPTIMIZERS = Registry("optimizer", check=check_optimizer)
OPTIMIZERS.add(
    "adamw",
    "vil.optim.optimizers:adamw",
    "Adam with decoupled weight decay",
    can_shard=True,
    adaptive=True,
)
OPTIMIZERS.add("adam", "vil.optim.optimizers:adam", "Adam", can_shard=True, adaptive=True)
OPTIMIZERS.add(
    "sgd", "vil.optim.optimizers:sgd", "SGD with momentum", can_shard=True, drops_on_plateau=True
)
OPTIMIZERS.add("lamb", "vil.optim.optimizers:lamb", "layer-wise adaptive Adam", can_shard=True)
OPTIMIZERS.add("lars", "vil.optim.optimizers:lars", "layer-wise adaptive SGD")
OPTIMIZERS.add("larc", "vil.optim.optimizers:larc", "LARS, clipped at the learning rate")
OPTIMIZERS.add(
    "qhm", "vil.optim.optimizers:qhm", "quasi-hyperbolic momentum", drops_on_plateau=True
)
OPTIMIZERS.add("apex_lamb", "vil.optim.optimizers:apex_lamb", "NVIDIA apex's fused LAMB")
OPTIMIZERS.add(
    "apex_adam", "vil.optim.optimizers:apex_adam", "NVIDIA apex's fused Adam", adaptive=True
)

SCHEDULES = Registry("learning-rate schedule", check=check_schedule)
SCHEDULES.add("", "vil.optim.schedules:constant", "constant, without a warm-up")
SCHEDULES.add("multistep", "vil.optim.schedules:multistep", "divided at some epochs")
SCHEDULES.add("cosine", "vil.optim.schedules:cosine", "half a cosine down to SOLVER.MIN_LR")
SCHEDULES.add("linear", "vil.optim.schedules:linear", "a line down to SOLVER.MIN_LR")


def register_optimizer(
    name: str,
    build: Callable | str,
    *,
    keys: Mapping[str, str | Key] | None = None,
    can_shard: bool = False,
    about: str = "",
) -> None:
    """Add an optimizer for OPTIM.OPT: build(groups, settings, **own) -> torch Optimizer, or its
    "module:attribute", which is imported when it is first used.

    `groups` are parameter groups of `decay_groups`, to be passed to the optimizer unchanged, and
    `settings` the `Settings` of every optimizer. `keys` maps each own argument to its config key.
    can_shard: the update is also correct for parameters that FSDP shards.

    Raises ValueError for a name that is taken, and where one step on two small parameters fails.
    """
    OPTIMIZERS.register(name, build, about, keys=keys, can_shard=can_shard)


def register_schedule(
    name: str,
    function: Callable | str,
    *,
    keys: Mapping[str, str | Key] | None = None,
    about: str = "",
) -> None:
    """Add a schedule for SOLVER.LR_POLICY: function(schedule, time, **own) -> learning rate, or its
    "module:attribute".

    `schedule` is the `Schedule` with all settings, `time` counts its ticks: steps, or epochs if
    epoch_based. `keys` maps each own argument to its config key.
    """
    SCHEDULES.register(name, function, about, keys=keys)
