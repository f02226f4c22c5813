"""Local 2-D attention as pure tensor functions, computed by interchangeable backends.

A window or a pattern defines which keys each query attends to. Names are imported at their first
use, so that importing this package does not import torch.
"""

from vil.utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "BACKENDS": "vil.ops.backends",
        "Backend": "vil.ops.backends",
        "Case": "vil.ops.attention_case",
        "Layout": "vil.ops.layout",
        "LocalBias": "vil.ops.bias",
        "Window": "vil.ops.window",
        "choose": "vil.ops.dispatch",
        "explain": "vil.ops.dispatch",
        "local_attention": "vil.ops.functional",
        "register_backend": "vil.ops.backends",
    },
)
