"""The optimizers of timm, as entries of OPTIMIZERS with the names timm/<name>, such as timm/muon.

This file adds properties that timm's registry does not have, such as whether FSDP may shard the
parameters. As in timm's train script, the betas and eps of OPTIM.ADAM are passed only if they
differ from the config's defaults. Otherwise, the optimizer's own defaults apply, such as Lion's
betas (0.9, 0.99).
"""

import functools
import inspect
import logging
import random
from collections.abc import Callable
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from torch.optim import Optimizer

from vil.optim.optimizers import Settings
from vil.utils.registry import Entry

log = logging.getLogger(__name__)
PREFIX = "timm/"

# Classes whose update of an element depends on this element only, not on the rest of the tensor by
# a norm, a mean, a factored state or a matrix product. With timm's option `caution`, every class
# uses a mean.
ELEMENTWISE = {
    *("AdaBelief", "Adadelta", "Adagrad", "Adam", "AdamW", "AdamWLegacy", "Adamax", "Adan"),
    *("Adopt", "LaProp", "Lion", "MADGRAD", "NAdam", "NAdamLegacy", "NAdamW", "RAdam"),
    *("RAdamLegacy", "RMSprop", "RMSpropTF", "SGD", "SGDW"),
}
# {package of an optimizer class outside of timm and torch: why the class is refused}
OTHER_PACKAGES = {
    "bitsandbytes": "it needs bitsandbytes, whose state is not tested with exact resuming",
    "apex": "it needs NVIDIA's apex: use apex_adam or apex_lamb",
}


@functools.cache
def timm_entries() -> dict[str, Entry]:
    """Return {"timm/<name>": entry} for all optimizers of the installed version of timm."""
    return {PREFIX + name: make_entry(name) for name in map(str, list_optimizers())}


def make_entry(name: str) -> Entry:
    """Return the registry entry of a timm optimizer. name: timm's name, without "timm/"."""
    info = get_optimizer_info(name)
    # the class's name, or "module.class" for a class outside of timm and torch
    location = info.opt_class if isinstance(info.opt_class, str) else info.opt_class.__name__
    cautious = (info.defaults or {}).get("caution", False)
    facts: dict[str, Any] = dict(can_shard=location in ELEMENTWISE and not cautious)
    package = location.partition(".")[0]
    if info.second_order:
        facts["refused"] = "it needs a second backward pass through the gradients in every step"
    elif package in OTHER_PACKAGES:
        facts["refused"] = OTHER_PACKAGES[package]
    return Entry(PREFIX + name, functools.partial(build, name), info.description, {}, facts)


def build(name: str, groups: list[dict], s: Settings) -> Optimizer:
    """Build a timm optimizer for the groups from `decay_groups`. name: without "timm/"."""
    info, own = get_optimizer_info(name), {}
    for key in ("betas", "eps"):
        value = combine(info, key, getattr(s, key))
        if value is not None:
            own[key] = value
    create = CREATE.get(getattr(info.opt_class, "__name__", ""), create_optimizer_v2)
    return create(groups, opt=name, lr=s.lr, momentum=s.momentum, **own)


def combine(info: Any, key: str, value: Any) -> Any:
    """Return the value to pass as argument `key` to a timm optimizer, or None to pass no value.

    info: timm's `OptimInfo` of the optimizer. key: "betas" or "eps". value: its value in the
    config.

    If the value is the config's default, it is not passed, so that the default of the optimizer's
    class applies. If only one of two betas is the config's default, that beta is replaced by the
    class's default. An optimizer with three betas, such as Adan, always uses its own defaults. A
    warning is logged if the config has other betas.
    """
    default = getattr(Settings, key)
    if not getattr(info, f"has_{key}") or value == default:
        return None
    if key == "eps":
        return value
    if info.num_betas != len(value):
        log.warning(
            "timm/%s has %d betas and uses their defaults, so OPTIM.ADAM.BETA1 and "
            "OPTIM.ADAM.BETA2 have no effect",
            info.name,
            info.num_betas,
        )
        return None
    parameters = inspect.signature(get_optimizer_class(info.name, bind_defaults=False)).parameters
    own = (info.defaults or {}).get("betas", parameters["betas"].default) or value
    return tuple(o if b == d else b for b, d, o in zip(value, default, own))


def create_muon(groups: list[dict], **arguments: Any) -> Optimizer:
    """Build Muon, which updates weight matrices, with AdamW or NAdamW for other parameters.

    By default, timm applies Muon to every parameter with the shape of a matrix. This function
    excludes groups whose "no_decay" is True, such as position embeddings and relative position bias
    tables. timm's option `fallback_no_weight_decay` does this for a model's `no_weight_decay` list.
    """
    groups = [{**group, "use_fallback": group["no_decay"]} for group in groups]
    return create_optimizer_v2(groups, **arguments)


def create_kron(groups: list[dict], **arguments: Any) -> Optimizer:
    """Build Kron. Its random numbers are seeded by the step, so they are equal on all ranks."""
    kron: Any = create_optimizer_v2(groups, deterministic=True, **arguments)
    update = kron.step

    @functools.wraps(update)
    def step(*args: Any) -> Any:
        kron.rng = random.Random(max((state["step"] for state in kron.state.values()), default=0))
        # compiling its functions for every shape of a weight would take minutes
        with torch.compiler.set_stance("force_eager"):
            return update(*args)

    kron.step = step
    return kron


# {class: function that builds it instead of create_optimizer_v2}
CREATE: dict[str, Callable[..., Optimizer]] = {"Muon": create_muon, "Kron": create_kron}
