"""Forward passes over images that do not fit into memory, with the result of the whole image.

Local attention needs only the rows around a strip, and global tokens merge what they attend to
strip by strip. `forward.py` is the entry, `planner.py` chooses strips, `passes.py` runs them.
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
