"""Read and write weight files without executing their content.

`write_weights` writes a safetensors file whose header also holds the SHA-256 of the tensors and the
model card (vil/pretrained/model_card.py). The format itself has no checksum, so reading verifies
this one.
"""

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

from vil.utils.atomic_write import set_default_permissions, sha256_of, write_aside
from vil.utils.errors import CheckpointError, explain_load_error

# Keys that hold the state dict in checkpoints of other programs, averaged weights first.
WRAPPERS = ("net", "state_dict_ema", "model_ema", "model", "state_dict")
PREFIXES = ("module.", "_orig_mod.")  # added by DistributedDataParallel and torch.compile
# names that vil/engine/checkpoint/save_load.py writes
POINTERS, CHECKPOINT_FILES = ("best", "last"), ("ema.safetensors", "model.safetensors")
COUNTER = "n_averaged"  # buffer of torch's AveragedModel
SHA256, CARD = "sha256", "vil"  # header keys: SHA-256 of the tensors, model card


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a weight file, checkpoint, run or model folder.

    Averaged weights are preferred. .pt and .pth files are read without unpickling objects; the
    reference's {net, arch, ...}, {model, ...}, {state_dict, ...} and timm's averaged weights are
    unwrapped, and prefixes `module.` and `_orig_mod.` that all keys share are removed.
    Raises CheckpointError for a file that is missing, damaged or holds anything but tensors.
    """
    path = find_weights(Path(path))
    if not path.is_file():
        raise CheckpointError(f"no weight file at {path}")
    try:
        if path.suffix == ".safetensors":
            return _strip_wrappers(_read_safetensors(path))
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # torch warns about files that it then rejects
            content = torch.load(path, "cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # arbitrary bytes raise any exception in torch's reader
        reason, digest = explain_load_error(error), sha256_of(path)
        raise CheckpointError(
            f"{path} is damaged or not a weight file: {reason} (its SHA-256 is {digest})"
        ) from None
    try:
        return unwrap(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a state dict: {error}") from None


def find_weights(path: Path) -> Path:
    """Return the weight file of a run, of `best` or `last`, of a folder, or the path itself."""
    if (path / "config.yaml").is_file():
        path = path / "checkpoints/best"
    if path.name in POINTERS and path.is_file():
        path = path.parent / Path(path.read_text(errors="replace").strip()).name
    if not path.is_dir():
        return path
    files = [path / name for name in CHECKPOINT_FILES]
    return next((file for file in files if file.is_file()), files[-1])


def unwrap(content: object) -> dict[str, Tensor]:
    """Return the state dict in the content of a file. ValueError if there is none."""
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    values = content.values() if isinstance(content, dict) else ()
    if not values or not all(isinstance(value, Tensor) for value in values):
        raise ValueError("it must map names to tensors")
    return _strip_wrappers(content)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        expected = (file.metadata() or {}).get(SHA256)
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    if expected and (digest := hash_tensors(state)) != expected:
        raise CheckpointError(
            f"{path} is damaged: the SHA-256 of its tensors is {digest}, its header has {expected}"
        )
    if not state:
        raise CheckpointError(f"{path} is not a state dict: it must map names to tensors")
    return state


def _strip_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the shared key prefixes and the buffer that wrappers add."""
    state = {key: value for key, value in state.items() if key != COUNTER}
    for prefix in PREFIXES * 2:  # wrappers nest in either order
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def write_weights(path: str | Path, tensors: Mapping[str, Tensor], card: Mapping) -> None:
    """Write a .safetensors file atomically, with a model card that JSON can hold.

    Raises CheckpointError if the file cannot be written.
    """
    path, tensors = Path(path), {name: value.contiguous() for name, value in tensors.items()}
    header = {"format": "pt", SHA256: hash_tensors(tensors), CARD: json.dumps(card)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_aside(path) as aside:
            save_file(tensors, aside, header)
            set_default_permissions(aside)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be written: {reason}") from None


def read_metadata(path: str | Path) -> dict | None:
    """Return the model card of a file that `write_weights` wrote, None for other files."""
    path = Path(path)
    if path.suffix != ".safetensors":
        return None
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(CARD)
        return json.loads(text) if text else None
    except Exception as error:  # noqa: BLE001 - see read_weights
        raise CheckpointError(f"{path} is damaged or not a weight file: {error}") from None


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
