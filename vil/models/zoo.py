"""The named models: architectures of arXiv:2103.15358, tables 1 and 9, and the two in Swin's shape
that its authors published later.
"""

import fnmatch

from vil.models.arch import parse_arch
from vil.models.msvit import MsViT
from vil.utils.table import lookup

TINY = (
    "l1,h1,d48,n1,s1,g1,p4,f7,a{a}_l2,h3,d96,n1,s1,g1,p2,f7,a{a}_"
    "l3,h3,d192,n9,s0,g1,p2,f7,a{a}_l4,h6,d384,n1,s0,g0,p2,f7,a{a}"
)
DEEP = (
    "l1,h3,d96,n1,s1,g1,p4,f7,a{{a}}_l2,h3,d192,n{},s1,g1,p2,f7,a{{a}}_"
    "l3,h6,d384,n{},s0,g1,p2,f7,a{{a}}_l4,h12,d768,n1,s0,g0,p2,f7,a{{a}}"
)
MEDIUM_WIDE = (
    "l1,h3,d192,n1,s1,g1,p4,f7,a{a}_l2,h6,d384,n2,s1,g1,p2,f7,a{a}_"
    "l3,h8,d512,n8,s0,g1,p2,f7,a{a}_l4,h12,d768,n1,s0,g0,p2,f7,a{a}"
)
BASE_WIDE = (
    "l1,h3,d192,n1,s1,g1,p4,f8,a{a}_l2,h6,d384,n2,s1,g1,p2,f8,a{a}_"
    "l3,h12,d768,n8,s0,g1,p2,f7,a{a}_l4,h16,d1024,n1,s0,g0,p2,f7,a{a}"
)
FAMILY = {
    "vil_tiny": TINY,
    "vil_small": DEEP.format(2, 8),
    "vil_medium_deep": DEEP.format(4, 16),
    "vil_base_deep": DEEP.format(8, 24),
    "vil_medium_wide": MEDIUM_WIDE,
    "vil_base_wide": BASE_WIDE,
}
SWIN = (
    "l1,h3,d96,n2,s1,g1,p4,f7,a0_l2,h6,d192,n2,s1,g1,p2,f7,a0_"
    "l3,h12,d384,n{},s0,g1,p2,f7,a0_l4,h24,d768,n2,s0,g0,p2,f7,a0"
)
# name -> ARCH; without suffix the absolute position embedding, `_rpb` the relative position bias
ARCHS = {
    name + suffix: arch.format(a=absolute)
    for name, arch in FAMILY.items()
    for suffix, absolute in (("", 1), ("_rpb", 0))
} | {"vil_swin_tiny_rpb": SWIN.format(6), "vil_swin_small_rpb": SWIN.format(18)}


def get_model(name: str, *, attention: str = "longformer", **kwargs) -> MsViT:
    """A named model with fresh weights; kwargs are MsViT's (img_size, num_classes, ...).

    attention: what stands where the architecture says local, by the rules of `parse_arch`. Raises
    ValueError for an unknown name.
    """
    return MsViT(parse_arch(lookup(ARCHS, name, "model"), attention), **kwargs)


def list_models(pattern: str = "*") -> list[str]:
    """The names that match a wildcard pattern."""
    return fnmatch.filter(ARCHS, pattern)
