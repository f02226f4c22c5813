"""Calls of linear layers and MLPs for which compiled code may be selected."""

import torch

import vil
from tests.common.native_cache import needs_compiler
from tests.common.small_runs import TINY
from vil.config import get_config
from vil.engine import distributed
from vil.engine.distributed import DistInfo
from vil.ops.dispatch import CHOICES
from vil.ops.native import library
from vil.workflows.attention_backend import select_attention_backends
from vil.workflows.execution import execution_of


@needs_compiler
def test_no_rank_uses_compiled_code_that_another_rank_cannot_load(monkeypatch):
    monkeypatch.setattr(library, "_off", [])
    monkeypatch.setattr(distributed, "all_reduce_max", lambda problem: 1)
    cfg = get_config(None, TINY)
    model = vil.build_model(cfg)
    execution = execution_of(cfg, torch.device("cpu"))
    select_attention_backends(model, execution, DistInfo(), training=True)
    assert library.prepare() == ["it cannot be used on another rank"]
    assert "native" not in [name for bucket, name in CHOICES.items() if bucket != "default"]
