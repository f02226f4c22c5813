"""Read files of torch.save that may come from untrusted sources.

No code in them runs, and reading takes no more memory than the file has bytes. Their tensors must
be ordinary ones, because compiled code trusts the shape of a tensor and does not see that other
kinds, such as sparse or expanded tensors, hold fewer elements.
"""

import argparse
import itertools
import mmap
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
ZIP_START = b"PK\x03\x04"
PICKLE = "data.pkl"  # end of the name of the entry that torch unpickles
MAX_HEADER = 30 + 2 * 65535  # bytes before the content of an entry
# Names in a pickle after which torch allocates or reads memory that the file does not have.
UNSAFE = (b"\nbytearray\n", b"\n_rebuild_nested_tensor\n")


def load_torch_file(path: Path) -> Any:
    """Return the content of a file that torch.save wrote, with tensors on the CPU. Raises any
    exception if the file is damaged, and ValueError if its content is larger than the file."""
    check_declared_sizes(path)
    with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.simplefilter("ignore")  # torch warns about files that it then rejects
        return torch.load(path, "cpu", weights_only=True)


def check_declared_sizes(path: Path) -> None:
    """Raise ValueError if reading a file of torch.save takes more memory than the file has bytes.
    torch.save compresses nothing, and state dicts have none of the objects in UNSAFE."""
    size = path.stat().st_size
    with path.open("rb") as file:
        pickles = [(0, size)]  # the first and the last byte of the parts that may be pickles
        if file.read(4) == ZIP_START:
            entries = zipfile.ZipFile(file).infolist()
            declared = sum(entry.file_size for entry in entries)
            if declared > size or any(entry.compress_type for entry in entries):
                raise ValueError(
                    f"its entries are compressed or overlap: {declared} bytes in a file of {size}"
                )
            if min((entry.header_offset for entry in entries), default=0):
                raise ValueError("it begins with bytes that are not part of its archive")
            pickles = [
                (entry.header_offset, entry.header_offset + MAX_HEADER + entry.file_size)
                for entry in entries
                if entry.filename.lower().endswith(PICKLE)  # torch ignores the case
            ]
        if size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                for name, (start, end) in itertools.product(UNSAFE, pickles):
                    if content.find(name, start, end) >= 0:
                        raise ValueError(f"it has a {name.decode().strip()}, which torch trusts")


def check_tensors(tensors: Iterable[tuple[str, Tensor]], size: int) -> None:
    """Raise ValueError if a tensor, given with its name, is not an ordinary one (see
    `describe_unusual`), or if the tensors have more bytes than their file. size: the file's bytes.
    """
    storages = {}
    for name, tensor in tensors:
        if reason := describe_unusual(tensor):
            raise ValueError(f"{name} is {reason}: save it as an ordinary tensor")
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    if sum(storages.values()) > size:
        raise ValueError(f"its tensors have {sum(storages.values())} bytes, the file has {size}")


def describe_unusual(tensor: Tensor) -> str:
    """Return what distinguishes a tensor from one with a value in memory for each element of its
    shape, such as "quantized". Returns "" for such an ordinary tensor."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_meta:
        return "a meta tensor without values"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return f"sparse ({tensor.layout})"
    if tensor.dtype not in DTYPES:
        return f"of the unsupported type {tensor.dtype}"
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    if end > tensor.untyped_storage().nbytes():
        return f"expanded to {tuple(tensor.shape)} from fewer values"
    return ""
