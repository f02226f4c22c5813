"""Write a config as YAML that loads as the same tree.

CfgNode.dump is not used: it sorts keys, and writes text such as 1e-3 without quotes, which would be
loaded as a number.
"""

import math
from collections.abc import Sequence
from typing import Any

import yaml
from yacs.config import CfgNode

from vil.config.coercion import free


def dump(cfg: CfgNode) -> str:
    """Return a config as YAML text, with one line per key."""
    return yaml.dump(cfg, Dumper=_Dumper, sort_keys=False, width=math.inf, allow_unicode=True)


def dump_value(value: Any) -> str:
    """Return the value of a config key as YAML text."""
    return dump(CfgNode({"KEY": value})).partition(":")[2].strip()


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    """Write text on one line, with quotes if it would be loaded as another type."""
    style = None if free(text) == text and text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


def _represent_items(dumper: _Dumper, items: Sequence[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_items)
_Dumper.add_representer(tuple, _represent_items)
_Dumper.add_representer(CfgNode, _Dumper.represent_dict)
