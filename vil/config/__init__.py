"""One tree of declared keys (defaults), set from YAML files and KEY VALUE pairs (yaml_source), read
by type (coercion), merged and checked (load), written again (dump_yaml).

Imports no torch, so that a wrong key is answered at once. Names are loaded on first use.
"""

from vil.utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "LEGACY_ATTN_BACKENDS": "vil.config.legacy",
        "ConfigError": "vil.utils.errors",
        "diff": "vil.config.load",
        "dump": "vil.config.dump_yaml",
        "get_config": "vil.config.load",
        "load_config": "vil.config.load",
        "override": "vil.config.load",
    },
)
