"""Local attention, its windows, definition and backends: pure tensor functions, no modules."""

from vil.ops.attention_case import Case
from vil.ops.bias import LocalBias
from vil.ops.dispatch import BACKENDS, Backend, choose, explain, register_backend
from vil.ops.local_attention import local_attention
from vil.ops.window import Window

__all__ = [
    "BACKENDS",
    "Backend",
    "Case",
    "LocalBias",
    "Window",
    "choose",
    "explain",
    "local_attention",
    "register_backend",
]
