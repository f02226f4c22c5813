"""The config: one tree of declared keys, set from YAML files and KEY VALUE pairs.

defaults    declares the keys             yaml_source  reads YAML files and KEY VALUE pairs
coercion    converts values to types      load         merges and checks all settings
rules       allowed values                dump_yaml    writes a config
presets     sets of keys for a purpose    plugins      runs files that register components
legacy      the 2021 code's spellings     registries   components that are values of keys
key_lookup  finds keys by name            unused_keys  warns about keys without effect
removed     keys of earlier configs

Importing this package does not import torch, so that a wrong key is reported immediately.
"""

from vil.utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "LEGACY_ATTN_BACKENDS": "vil.config.legacy",
        "ConfigError": "vil.utils.errors",
        "describe_preset": "vil.config.presets",
        "diff": "vil.config.load",
        "dump": "vil.config.dump_yaml",
        "get_config": "vil.config.load",
        "load_config": "vil.config.load",
        "override": "vil.config.load",
    },
)
