"""Run forward passes over images that do not fit into memory, in horizontal strips.

The result equals that of a forward pass over the full image, because local attention needs only a
strip and the rows around it, and global tokens attend to all strips in turn. `forward.py` has the
public functions.
"""

from vil.utils.lazy import lazy_exports

_HERE = "vil.streaming"
__getattr__, __dir__, __all__ = lazy_exports(
    _HERE,
    {
        "Normalize": f"{_HERE}.images",
        "StagePlan": f"{_HERE}.plan",
        "StreamPlan": f"{_HERE}.plan",
        "StreamResult": f"{_HERE}.outputs",
        "plan_stream": f"{_HERE}.forward",
        "prepare": f"{_HERE}.forward",
        "stream": f"{_HERE}.forward",
    },
)
