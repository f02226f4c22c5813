"""Read and write weight files without executing code that they contain.

`write_weights` writes a safetensors file. Its header also has the model card, which describes the
model (vil/pretrained/model_card.py), and the SHA-256 of the tensors, which is verified when the
file is read.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vil.pretrained.card_schema import check_card, check_size
from vil.utils.atomic_write import set_default_permissions, sha256_of, write_aside
from vil.utils.errors import CheckpointError, explain_load_error
from vil.utils.torch_file import check_tensors, load_torch_file

# Keys that hold the state dict in checkpoints of other programs, averaged weights first.
WRAPPERS = ("net", "state_dict_ema", "model_ema", "model", "state_dict")
PREFIXES = ("module.", "_orig_mod.")  # added by DistributedDataParallel and torch.compile
# names that vil/engine/checkpoint/save_load.py writes
POINTERS, CHECKPOINT_FILES = ("best", "last"), ("ema.safetensors", "model.safetensors")
CHECKPOINTS = "checkpoints"  # the folder of a run that has its checkpoints
COUNTER = "n_averaged"  # buffer of torch's AveragedModel
SHA256, CARD = "sha256", "vil"  # header keys: SHA-256 of the tensors, model card


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a weight file, a checkpoint, a run folder or a model folder.

    If a checkpoint has averaged weights (EMA), these are returned. The state dict may be under a
    key such as "model", as in timm's checkpoints. The prefixes `module.` and `_orig_mod.` are
    removed if all keys have them. .pt and .pth files are read without unpickling arbitrary objects.
    Raises CheckpointError if the file is missing, damaged, contains no state dict or more than its
    size, or if a tensor is not an ordinary one (see `vil.utils.torch_file`).
    """
    path = find_weights(Path(path))
    if not path.is_file():
        raise CheckpointError(f"no weight file at {path}")
    try:
        is_safetensors = path.suffix == ".safetensors"
        content = _read_safetensors(path) if is_safetensors else load_torch_file(path)
    except CheckpointError:
        raise
    except Exception as error:  # arbitrary bytes raise any exception in torch's reader
        reason, digest = explain_load_error(error), sha256_of(path)
        raise CheckpointError(
            f"{path} is damaged or not a weight file: {reason} (its SHA-256 is {digest})"
        ) from None
    try:
        state = unwrap(content)
        check_tensors(state.items(), path.stat().st_size)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a state dict: {error}") from None
    return state


def find_weights(path: Path) -> Path:
    """Return the weight file that a path given by the user refers to.

    - the folder of a run: the weight file of the run's best checkpoint
    - a run's file `best` or `last`, which contains the name of a checkpoint: its weight file
    - any other folder, such as a checkpoint: the weight file in the folder
    - any other path: the path itself
    """
    if (path / "config.yaml").is_file():
        path = path / CHECKPOINTS / "best"
    if path.name in POINTERS and path.is_file():
        path = path.parent / Path(path.read_text(errors="replace").strip()).name
    if not path.is_dir():
        return path
    files = [path / name for name in CHECKPOINT_FILES]
    return next((file for file in files if file.is_file()), files[-1])


def find_run(path: Path) -> Path | None:
    """Return the folder of the run that `path` belongs to; None if it belongs to no run.

    path: the folder of a run, one of its checkpoints, a file in a checkpoint, or the run's file
    `best` or `last`.
    """
    path = Path(os.path.abspath(path))
    folders = [path]
    for checkpoint in (path, path.parent):
        is_checkpoint = checkpoint.name in POINTERS or re.fullmatch("step-[0-9]+", checkpoint.name)
        if is_checkpoint and checkpoint.parent.name == CHECKPOINTS:
            folders.append(checkpoint.parent.parent)
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def unwrap(content: object) -> dict[str, Tensor]:
    """Return the state dict in a loaded checkpoint.

    It is the dict under a key such as "model", or else the content itself. The prefixes `module.`
    and `_orig_mod.` are removed if all keys have them. Raises ValueError if there is no state dict.
    """
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    items = content.items() if isinstance(content, dict) else ()
    if not items or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in items):
        raise ValueError("expected a dict {name: tensor}")
    return _strip_wrappers(content)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        expected = (file.metadata() or {}).get(SHA256)
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    if expected and (digest := hash_tensors(state)) != expected:
        raise CheckpointError(
            f"{path} is damaged: the SHA-256 of its tensors is {digest}, but its header has "
            f"{expected}"
        )
    if not state:
        raise CheckpointError(
            f"{path} is not a state dict: expected names and tensors, but it is empty"
        )
    return state


def _strip_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove what DDP, torch.compile and AveragedModel add to a state dict. Removes the prefixes
    `module.` and `_orig_mod.` if all keys have them, and the buffer `n_averaged`."""
    state = {key: value for key, value in state.items() if key != COUNTER}
    for prefix in PREFIXES * 2:  # wrappers nest in either order
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def write_weights(path: str | Path, tensors: Mapping[str, Tensor], card: Mapping | None) -> None:
    """Write tensors to a .safetensors file atomically, with their SHA-256 in its header.

    card: the model card, a dict for JSON that describes the model. It is also written to the
    header, unless it is None. Raises CheckpointError if the file cannot be written.
    """
    path, tensors = Path(path), {name: value.contiguous() for name, value in tensors.items()}
    header = {"format": "pt", SHA256: hash_tensors(tensors)}
    header |= {} if card is None else {CARD: json.dumps(card)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_aside(path) as aside:
            save_file(tensors, aside, header)
            set_default_permissions(aside)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be written: {reason}") from None


def read_metadata(path: str | Path) -> dict | None:
    """Read the model card, which describes the model, from a weight file. Returns None if the file
    has no model card. Raises CheckpointError if the file is damaged or the card is not valid."""
    path = Path(path)
    if path.suffix != ".safetensors":
        return None
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(CARD)
        card = json.loads(text) if text else None
    except Exception as error:  # noqa: BLE001 - see read_weights
        raise CheckpointError(f"{path} is damaged or not a weight file: {error}") from None
    if card is not None:
        check_size(check_card(card, path), path)
    return card


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a state dict as hex digits. It depends on all names, dtypes, shapes and
    values, but not on the order of the tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
