"""vil: train multi-scale vision transformers with local 2-D attention (Vision Longformer).

`import vil` does not import torch. The public names, such as `vil.train`, are imported from their
modules when they are first used.
"""

import importlib

__version__ = "0.1.0"
_HOMES = {
    "build_model": "vil.workflows.build_model",
    "embed": "vil.workflows.embed",
    "evaluate": "vil.workflows.evaluate",
    "load_for_inference": "vil.workflows.inference",
    "predict": "vil.workflows.predict",
    "predict_out_of_fold": "vil.workflows.out_of_fold",
    "sweep": "vil.workflows.sweep",
    "train": "vil.workflows.train",
    "build_attention": "vil.layers.attention",
    "build_block": "vil.layers.block",
    "from_pretrained": "vil.pretrained.hub",
    "get_model": "vil.pretrained.get_model",
    "get_model_weights": "vil.pretrained.catalog",
    "get_weight": "vil.pretrained.catalog",
    "list_models": "vil.models.registry",
    "load_weights": "vil.pretrained.load_weights",
    "optimize_for_inference": "vil.integrations.optimize",
    "patch_attention": "vil.integrations.patch_attention",
    "Key": "vil.utils.registry",
    "register_attention": "vil.layers.attention",
    "register_backend": "vil.ops",
    "register_dataset": "vil.data",
    "register_loss": "vil.tasks.image",
    "register_optimizer": "vil.optim",
    "register_pattern": "vil.ops.patterns",
    "register_schedule": "vil.optim",
    "register_task": "vil.tasks",
    "register_transform": "vil.data",
    "local_attention": "vil.ops",
    "plan_stream": "vil.streaming",
    "stream": "vil.streaming",
    "save_pretrained": "vil.pretrained.hub",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name == "errors":
        return importlib.import_module("vil.errors")
    home = "vil.pretrained.catalog" if name.endswith("_Weights") else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'vil' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
