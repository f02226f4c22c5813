"""One tree of declared keys (defaults), set from YAML files and KEY VALUE pairs (load).

Imports nothing else of the package, so that a config can be read and checked without torch.
"""

from vil.config.legacy import HISTORIC
from vil.config.load import ConfigError, diff, dump, get_config, load_config

__all__ = ["HISTORIC", "ConfigError", "diff", "dump", "get_config", "load_config"]
