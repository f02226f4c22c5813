"""Files of weights: read without running what is in them, written with a note of what they are.

A file of ours is a safetensors file whose header has, besides the tensors, their SHA-256 and what
the weights belong to. A changed bit is found when it is read: the format itself would not notice.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vil.utils.atomic_write import like_others, sha256_of, write_aside
from vil.utils.errors import CheckpointError, of_torch_load

# Where other programs put the weights in their checkpoints; averaged ones first, as from our own.
WRAPPERS = ("net", "state_dict_ema", "model_ema", "model", "state_dict")
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
# of our checkpoints, as vil/engine/checkpoint/save_load.py writes them
POINTERS, IN_A_FOLDER = ("best", "last"), ("ema.safetensors", "model.safetensors")
COUNTER = "n_averaged"  # of torch's AveragedModel
SHA256, ABOUT = "sha256", "vil"  # in a header: the tensors' SHA-256, and what they belong to


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, of a run, checkpoint or other folder of ours (averaged
    ones where there are some), or of a .pt/.pth file.

    A .pt file is read without unpickling objects; the reference's {net, arch, ...}, the usual
    {model, ...} and {state_dict, ...} and timm's averaged weights are unwrapped, and a prefix
    `module.` or `_orig_mod.` that all keys share is dropped.
    Raises CheckpointError for a file that is absent, damaged, or holds anything but tensors.
    """
    path = weights_at(Path(path))
    if not path.is_file():
        raise CheckpointError(f"no weight file at {path}")
    try:
        if path.suffix == ".safetensors":
            return _plain(_read_safetensors(path))
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # torch warns of files that it then refuses
            found = torch.load(path, "cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # arbitrary bytes make torch's reader fail with anything
        reason, digest = of_torch_load(error), sha256_of(path)
        raise CheckpointError(
            f"{path} is damaged or not a weight file: {reason} (its SHA-256 is {digest})"
        ) from None
    try:
        return unwrap(found)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a state dict: {error}") from None


def weights_at(path: Path) -> Path:
    """The file that a path stands for: of a run its best checkpoint, of `best` and `last` the one
    they name, of a folder the weights in it."""
    if (path / "config.yaml").is_file():
        path = path / "checkpoints/best"
    if path.name in POINTERS and path.is_file():
        path = path.parent / Path(path.read_text(errors="replace").strip()).name
    if not path.is_dir():
        return path
    return next(
        (path / name for name in IN_A_FOLDER if (path / name).is_file()), path / IN_A_FOLDER[-1]
    )


def unwrap(found: object) -> dict[str, Tensor]:
    """The state dict in what a file held; ValueError if there is none."""
    for key in WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(value, Tensor) for value in found.values())
    ):
        raise ValueError("it must map names to tensors")
    return _plain(found)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        wanted = (file.metadata() or {}).get(SHA256)
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    if wanted and (digest := fingerprint(found)) != wanted:
        raise CheckpointError(
            f"{path} is damaged: the SHA-256 of its tensors is {digest}, its header says {wanted}"
        )
    if not found:
        raise CheckpointError(f"{path} is not a state dict: it must map names to tensors")
    return found


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what wrappers put in front of every name, and beside them."""
    found = {key: value for key, value in state.items() if key != COUNTER}
    for prefix in PREFIXES * 2:  # one may wrap the other
        if all(key.startswith(prefix) for key in found):
            found = {key.removeprefix(prefix): value for key, value in found.items()}
    return found


def write_weights(path: str | Path, tensors: Mapping[str, Tensor], about: Mapping) -> None:
    """Write a .safetensors file in one piece; `about`, JSON, says what the weights belong to.

    Raises CheckpointError for a place that cannot be written.
    """
    path, tensors = Path(path), {name: value.contiguous() for name, value in tensors.items()}
    header = {"format": "pt", SHA256: fingerprint(tensors), ABOUT: json.dumps(about)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_aside(path) as aside:
            save_file(tensors, aside, header)
            like_others(aside)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be written: {reason}") from None


def read_about(path: str | Path) -> dict | None:
    """What the weights of a file of ours belong to; None for other files."""
    path = Path(path)
    if path.suffix != ".safetensors":
        return None
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(ABOUT)
        return json.loads(text) if text else None
    except Exception as error:  # noqa: BLE001 - see read_weights
        raise CheckpointError(f"{path} is damaged or not a weight file: {error}") from None


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of names, types, shapes and values; of a file's other bytes it knows nothing."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
