"""Store the fastest backend of each tuned case in a per-user file.

The file is $VIL_CACHE/attention.json, by default ~/.cache/vil/attention.json ($XDG_CACHE_HOME is
respected). Similar cases share a <bucket>, the result of `Case.bucket`:

    {"format": 1, "machines": {"<device>, <versions>, <hash of the code>": {"<bucket>": {
        "backend": "blocked", "trials": [{"name": ..., "forward": s, "backward": s, "bytes": n}]}}}}

A file that cannot be read or written, or is invalid, is ignored with a warning.
"""

import functools
import hashlib
import inspect
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vil.ops.dispatch import BACKENDS, CHOICES
from vil.ops.tuning.tuner import Trial
from vil.utils.atomic_write import replace_text
from vil.utils.cache_dir import cache_dir, hold_lock
from vil.utils.machine import processor, version

log = logging.getLogger(__name__)

FORMAT = 1


def path() -> Path:
    """Return the path of the cache file."""
    return cache_dir() / "attention.json"


def machine(device: str) -> str:
    """Return the key of this machine in the cache file.

    It contains the name and settings of the device, the versions of torch and triton, and a hash of
    the code.
    """
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    if device == "cpu":
        settings = f"{torch.get_num_threads()} threads"
    else:
        settings = f"products {torch.get_float32_matmul_precision()}"  # "high" allows TF32
    versions = f"torch {torch.__version__}, triton {version('triton')}, code {fingerprint()}"
    return f"{device} {name}, {settings}, {versions}"


def fingerprint() -> str:
    """Return a hash of the source files of vil/ops and of backends registered by other modules."""
    folder = Path(__file__).parents[1]
    files = {str(file) for suffix in ("py", "h", "cpp") for file in folder.rglob(f"*.{suffix}")}
    for name in BACKENDS:
        function = inspect.unwrap(BACKENDS[name].run)
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
        code = getattr(function, "__code__", None)
        module = sys.modules.get(type(function).__module__)  # of a callable object
        source = code.co_filename if code else getattr(module, "__file__", None)
        files |= {source} if source and Path(source).is_file() else set()
    contents = sorted(Path(file).read_bytes() for file in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:12]


def load(device: str) -> int:
    """Load the fastest backends on this machine from the cache file into CHOICES.

    device: "cpu" or "cuda". Returns the number of loaded cases.
    """
    machines, here = _read(), machine(device)
    if machines and here not in machines:
        log.warning(
            "the tuning cache %s has tuned backends, but not for the current machine, code and "
            "--import modules (%s): run vil tune",
            path(),
            here,
        )
    choices = {bucket: entry["backend"] for bucket, entry in machines.get(here, {}).items()}
    CHOICES.update(choices)
    return len(choices)


def save(device: str, trials: dict[str, list[Trial]]) -> bool:
    """Add trials on this machine to the cache file. Returns whether the file could be written.

    device: "cpu" or "cuda". trials: {`Case.bucket()`: trials, fastest first}.
    """
    found = {}
    for bucket, results in trials.items():
        usable = [asdict(trial) for trial in results if not trial.reason]
        if usable:
            found[bucket] = {"backend": usable[0]["name"], "trials": usable}
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(path().parent):  # another process may add entries
            machines = _read()
            machines.setdefault(machine(device), {}).update(found)
            text = json.dumps({"format": FORMAT, "machines": machines}, indent=1) + "\n"
            replace_text(path(), text)
    except OSError as error:
        log.warning("cannot write the tuned backends to %s: %s", path(), error.strerror or error)
        return False
    return True


def _read() -> dict[str, dict[str, Any]]:
    """Return {machine: {bucket: {"backend": name, "trials": [...]}}} from the cache file.

    Returns {} if the file is missing or invalid, and logs a warning if it is invalid.
    """
    try:
        content = json.loads(path().read_text(encoding="utf-8"))
        machines = content["machines"]
        entries = [entry for choices in machines.values() for entry in choices.values()]
        if content["format"] == FORMAT and all(type(e["backend"]) is str for e in entries):
            return machines
        error = "its format version is not supported"
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as invalid:
        error = invalid
    except (AttributeError, KeyError, TypeError):  # valid JSON with other content
        error = "it is not a tuning cache"
    log.warning("the tuning cache %s is ignored: %s (run vil tune again)", path(), error)
    return {}
