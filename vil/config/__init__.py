"""One tree of declared keys (defaults), set from YAML files and KEY VALUE pairs (sources), read by
type (values), joined and checked (load), written again (dumping).

Imports nothing else of the package, so that a config can be read and checked without torch.
"""

from vil.config.dump_yaml import dump
from vil.config.legacy import LEGACY_ATTN_BACKENDS
from vil.config.load import diff, get_config, load_config, override
from vil.utils.errors import ConfigError

__all__ = [
    "LEGACY_ATTN_BACKENDS",
    "ConfigError",
    "diff",
    "dump",
    "get_config",
    "load_config",
    "override",
]
