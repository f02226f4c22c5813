"""Run user code that registers components: Python files, and installed plug-ins.

The code runs before the config is checked, so that its components are valid choices. A config
records the files and plug-ins in IMPORTS, and runs them again when it is loaded.

A recorded file runs only if this user has named it before, with --import or from Python. Otherwise
the config of another user could run arbitrary code. A warning says if it has changed since then.
"""

import importlib.metadata
import importlib.util
import json
import logging
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from vil.utils.atomic_write import replace_text, sha256_of
from vil.utils.cache_dir import cache_dir
from vil.utils.errors import ConfigError, one_line

API_VERSION = 1  # of the plug-in interface; plug-ins state it as VIL_PLUGIN_API
GROUP = "vil.plugins"  # of Python entry points
PREFIX = "plugin:"  # of an installed plug-in in IMPORTS
_loaded: dict[str, str] = {}  # {entry point: problem, empty if there is none}

log = logging.getLogger(__name__)


def run_imports(named: Iterable[str], recorded: Iterable[tuple[str, str]]) -> list[str]:
    """Run the installed plug-ins and the given Python files. Returns the list to store in IMPORTS.

    named: files that the user passes with --import or from Python. recorded: the files and plug-ins
    in the IMPORTS of a config, as pairs (file or plug-in, its place in the config for messages).
    Raises ConfigError if a file or plug-in is missing, if its code fails, or if the user has never
    passed a recorded file.
    """
    installed = load_entry_points()
    for file in named:
        import_file(file)
    files = [str(Path(file).resolve()) for file in named]
    named_digests, trusted = file_digests(files), _read_trusted()
    for name, where in recorded:
        if name.startswith(PREFIX):
            if name not in installed:
                raise ConfigError(f"{where}: IMPORTS {name}: this plug-in is not installed")
        elif (path := str(Path(name).resolve())) not in files:
            if path not in trusted:
                raise ConfigError(
                    f"{where}: IMPORTS {path}: this config runs a Python file; add --import {path} "
                    "if you trust it"
                )
            if trusted[path] and file_digests([path]) != {path: trusted[path]}:
                text = "%s: IMPORTS %s has changed since you passed it with --import"
                log.warning(text, where, path)
            import_file(path)
            files.append(path)
    if trusted | named_digests != trusted:
        _write_trusted(trusted | named_digests)
    return [*installed, *files]


def file_digests(imports: Iterable[str]) -> dict[str, str]:
    """Return {path: SHA-256} of the Python files in IMPORTS that can be read."""
    digests = {}
    for name in imports:
        if not name.startswith(PREFIX):
            with suppress(OSError):
                digests[name] = sha256_of(Path(name))
    return digests


def load_entry_points() -> list[str]:
    """Load the installed plug-ins, once per process. Returns their names, such as "plugin:NAME".

    An entry point is a module that registers components when it is imported, or a function without
    arguments that registers them. Its module must have VIL_PLUGIN_API = 1. Raises ConfigError if it
    does not, or if its code fails.
    """
    names = []
    for point in importlib.metadata.entry_points(group=GROUP):
        names.append(PREFIX + point.name)
        if point.name not in _loaded:
            _loaded[point.name] = _load(point)
        if problem := _loaded[point.name]:
            raise ConfigError(f"plug-in {point.name}: {problem}")
    return names


def _load(point: importlib.metadata.EntryPoint) -> str:
    """Load a plug-in's entry point. Returns an error message, or "" on success."""
    try:
        loaded = point.load()
        module = sys.modules.get(getattr(loaded, "__module__", None) or loaded.__name__, loaded)
        version = getattr(module, "VIL_PLUGIN_API", None)
        if version != API_VERSION:
            return f"it has VIL_PLUGIN_API {version}, but this version of vil needs {API_VERSION}"
        if callable(loaded):
            loaded()
    except Exception as error:  # code of the plug-in raises anything
        return str(error) if isinstance(error, ValueError) else one_line(error)
    return ""


def import_file(file: str) -> None:
    """Run a Python file, unless this process has already run it without an error.

    Raises ConfigError if the file does not exist, is not a Python file, or raises an error.
    Components that were registered before the error stay registered.
    """
    name = f"vil_import {Path(file).resolve()}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or not Path(file).is_file():
        raise ConfigError(f"--import {file}: no such Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):  # Ctrl-C
            raise
        raise ConfigError(f"--import {file}{_describe(error, spec.origin)}") from error


def _describe(error: Exception, file: str) -> str:
    """Describe an error that code in `file` raised. Returns the end of an error message, which has
    the line number, if it is known, and the error."""
    if isinstance(error, SyntaxError):  # its message has the line
        return f": {error}"
    steps = traceback.extract_tb(error.__traceback__)
    lines = [step.lineno for step in steps if step.filename == file]
    where = f", line {lines[-1]}" if lines else ""
    return f"{where}: {error if isinstance(error, ValueError) else one_line(error)}"


def _trust_file() -> Path:
    return cache_dir() / "imports.json"


def _read_trusted() -> dict[str, str]:
    try:
        found = json.loads(_trust_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(found, list):  # of an earlier version, which recorded no digests
        found = {name: "" for name in found if isinstance(name, str)}
    return {name: str(digest) for name, digest in found.items()} if type(found) is dict else {}


def _write_trusted(files: Mapping[str, str]) -> None:
    """Store {path: SHA-256} of the Python files that this user has named, and therefore trusts.
    Does nothing if the cache folder cannot be written."""
    try:
        _trust_file().parent.mkdir(parents=True, exist_ok=True)
        replace_text(_trust_file(), json.dumps(files, indent=1, sort_keys=True) + "\n")
    except OSError:
        return
