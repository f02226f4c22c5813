"""Named architectures of MsViT.

Most are from arXiv:2103.15358, tables 1 and 9. The same authors later published the two vil_swin
models, which have the depths and widths of Swin. vil_nano is for scanned digits, in images of
64 x 64 pixels.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import replace

from vil.models.arch import StageSpec

DEEP = (
    "l1,h3,d96,n1,s1,g1,p4,f7,a{{a}}_l2,h3,d192,n{},s1,g1,p2,f7,a{{a}}_"
    "l3,h6,d384,n{},s0,g1,p2,f7,a{{a}}_l4,h12,d768,n1,s0,g0,p2,f7,a{{a}}"
)
FAMILY = {
    "vil_tiny": "l1,h1,d48,n1,s1,g1,p4,f7,a{a}_l2,h3,d96,n1,s1,g1,p2,f7,a{a}_"
    "l3,h3,d192,n9,s0,g1,p2,f7,a{a}_l4,h6,d384,n1,s0,g0,p2,f7,a{a}",
    "vil_small": DEEP.format(2, 8),
    "vil_medium_deep": DEEP.format(4, 16),
    "vil_base_deep": DEEP.format(8, 24),
    "vil_medium_wide": "l1,h3,d192,n1,s1,g1,p4,f7,a{a}_l2,h6,d384,n2,s1,g1,p2,f7,a{a}_"
    "l3,h8,d512,n8,s0,g1,p2,f7,a{a}_l4,h12,d768,n1,s0,g0,p2,f7,a{a}",
    "vil_base_wide": "l1,h3,d192,n1,s1,g1,p4,f8,a{a}_l2,h6,d384,n2,s1,g1,p2,f8,a{a}_"
    "l3,h12,d768,n8,s0,g1,p2,f7,a{a}_l4,h16,d1024,n1,s0,g0,p2,f7,a{a}",
}
SWIN = (
    "l1,h3,d96,n2,s1,g1,p4,f7,a0_l2,h6,d192,n2,s1,g1,p2,f7,a0_"
    "l3,h12,d384,n{},s0,g1,p2,f7,a0_l4,h24,d768,n2,s0,g0,p2,f7,a0"
)
NANO = "l1,h1,d32,n1,s1,g1,p4,f4,a0_l2,h2,d64,n2,s1,g1,p2,f3,a0_l3,h4,d128,n1,s0,g1,p2,f3,a0"
# name -> ARCH; absolute position embeddings, or with suffix `_rpb` relative position bias
ARCHS = (
    {
        name + suffix: arch.format(a=absolute)
        for name, arch in FAMILY.items()
        for suffix, absolute in (("", 1), ("_rpb", 0))
    }
    | {"vil_swin_tiny_rpb": SWIN.format(6), "vil_swin_small_rpb": SWIN.format(18)}
    | {"vil_nano": NANO}
)
# settings that differ from MsViT's defaults
DEFAULTS = {"vil_nano": {"img_size": 64, "num_classes": 10, "avg_pool": True}}


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the models that match a wildcard pattern, such as "vil_small*"."""
    return fnmatch.filter(ARCHS, pattern)


def replace_windows(
    name: str, stages: Sequence[StageSpec], windows: int | Sequence[int] | None
) -> list[StageSpec]:
    """Return the stages with other window sizes.

    windows: one size for all stages, or one size per stage; None to keep the sizes. In attention
    without windows, the size has another meaning, see `StageSpec.attn_size`. name: the model's
    name, for the error message. Raises ValueError if the number of sizes is not the number of
    stages.
    """
    if windows is None:
        return list(stages)
    windows = [windows] * len(stages) if isinstance(windows, int) else windows
    if len(windows) != len(stages):
        raise ValueError(
            f"{name} has {len(stages)} stages, but got {len(windows)} window sizes: give one size "
            f"for all stages, or {len(stages)} sizes"
        )
    return [replace(stage, attn_size=size) for stage, size in zip(stages, windows)]
