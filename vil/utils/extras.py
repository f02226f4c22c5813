"""Check that optional packages are installed, before they are used."""

import importlib.util
from typing import NamedTuple

from vil.utils.errors import DataError


class Extra(NamedTuple):
    """An optional package: the name of the module to import, and the name of the extra of vil that
    installs it (`pip install 'vil[NAME]'`)."""

    module: str
    name: str


SEGMENTATION = Extra("segmentation_models_pytorch", "segmentation")
GEO = Extra("mpl_toolkits.basemap_data", "geo")


def is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing it. A folder of the same name as a
    top-level module in the current folder, such as `datasets`, does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and (spec.origin is not None or "." in module)


def require_extra(extra: Extra, user: str) -> None:
    """Raise DataError, with the pip command to run, if an optional package is not installed.

    user: noun for what needs the package, such as "the dataset a.parquet", for the message.
    """
    if not is_installed(extra.module):
        raise DataError(f"{user} needs {extra.module}: pip install 'vil[{extra.name}]'")
