"""Read images in a .zip or an uncompressed .tar without extracting it.

The list of members is stored in a few numpy arrays, which forked workers share.

- Links, special files, and members whose names are absolute or contain ".." are left out with a
  warning.
- Of several members with the same name, the last is used, with a warning.
- An encrypted zip member, or one with a compression other than deflate, raises DataError.
"""

import io
import logging
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from vil.data.bands import BandImage
from vil.data.dataset import ImageDataset
from vil.data.formats.shared_file import SharedFile
from vil.data.image import UnreadableImage
from vil.utils.errors import DataError
from vil.utils.plural import plural

logger = logging.getLogger(__name__)

# Larger members are not read, because a corrupt header may state any size. No image that PIL
# accepts is larger.
MAX_BYTES = 1 << 30
MAX_HEADER = 1 << 20  # bytes of a tar's long names and other extended headers
MAX_MEMBERS = 1 << 26  # ImageNet-22k has 14 million images
ENCRYPTED = 99  # value of the field `method` for encrypted members, as the zip format has for AES


class Archive:
    """An archive file, and M of its members, in the file's order.

    These are the members for which wanted(name, size) is True. Links, special files, members with
    unsafe names, and members that are repeated later are left out.
    `names` (M,): the members' names as bytes. `fields` (M,): a structured array of what `read`
    needs, such as offsets. A subclass sets `dtype`, the type of `fields`, and defines `members` and
    `read`.
    """

    dtype: list[tuple]

    def __init__(self, path: Path, wanted: Callable[[str, int], bool]):
        self.file = SharedFile(path)
        rows, unsafe, repeated = {}, [], []
        for count, (name, size, is_plain, row) in enumerate(self.members(path)):
            if count == MAX_MEMBERS:
                raise DataError(f"{path} has more than {MAX_MEMBERS} members")
            if not wanted(name, size):
                continue
            if not is_plain or name.startswith("/") or ".." in name.split("/"):
                unsafe.append(name)
                continue
            if rows.pop(name, None):
                repeated.append(name)
            rows[name] = row
        warn(
            path,
            "left out because they are links or special files, or their names are absolute or "
            "have '..'",
            unsafe,
        )
        warn(path, "not used, because a later member of the archive has the same name", repeated)
        self.names = np.array([os.fsencode(name) for name in rows])
        self.fields = np.array(list(rows.values()), self.dtype)

    def __len__(self) -> int:
        return len(self.fields)

    def name(self, index: int) -> str:
        """Return <archive>@<member>, such as train.zip@cat/1.jpg."""
        return f"{Path(self.file.path).name}@{os.fsdecode(self.names[index])}"

    def members(self, path: Path) -> Iterator[tuple[str, int, bool, tuple]]:
        """Yield (name, size in bytes, is_plain, row) for each member of the archive.

        is_plain is False for a link or a special file. row is the member's entry of `fields`.
        Raises DataError if the file is not a complete archive.
        """
        raise NotImplementedError

    def read(self, index: int) -> bytes:
        """Return the decompressed bytes of the member at `index`. Raises UnreadableImage if the
        member is corrupt or too large, and OSError if the archive cannot be read."""
        raise NotImplementedError


class ZipArchive(Archive):
    """A .zip archive with stored or deflated members. The field `offset` is the position of a
    member's local header, which precedes its data."""

    dtype = [("offset", "i8"), ("packed", "i8"), ("size", "i8"), ("method", "i2"), ("crc", "u4")]

    def __init__(self, path: Path, wanted: Callable[[str, int], bool]):
        super().__init__(path, wanted)
        methods = self.fields["method"]
        unsupported = ~np.isin(methods, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        for index in np.flatnonzero(unsupported)[:1]:
            raise DataError(
                f"{path}: {os.fsdecode(self.names[index])} is encrypted or compressed by method "
                f"{methods[index]}; only stored (0) and deflated (8) members are supported"
            )

    def members(self, path: Path) -> Iterator[tuple[str, int, bool, tuple]]:
        try:
            with zipfile.ZipFile(path) as archive:
                directory = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            raise DataError(f"{path} is not a zip, or is truncated: {error}") from error
        for entry in directory:
            # The upper half is the Unix file type, or 0 if the zip was made on another system.
            is_plain = not stat.S_ISLNK(entry.external_attr >> 16)
            method = ENCRYPTED if entry.flag_bits & 1 else entry.compress_type
            row = entry.header_offset, entry.compress_size, entry.file_size, method, entry.CRC
            yield entry.filename, entry.file_size, is_plain, row

    def read(self, index: int) -> bytes:
        """Return the decompressed bytes of a member. Raises UnreadableImage for a wrong
        checksum."""
        offset, packed, size, method, crc = self.fields[index].tolist()
        check_size(max(packed, size))
        header = self.file.read(offset, 30)
        if header[:4] != b"PK\3\4":
            raise UnreadableImage(
                "the zip has no file header at the offset that its directory lists"
            )
        data = self.file.read(offset + 30 + sum(struct.unpack("<HH", header[26:30])), packed)
        if method == zipfile.ZIP_DEFLATED:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, max(size, 1))
            except zlib.error as error:
                raise UnreadableImage(f"zlib.error: {error}") from error
        if len(data) != size or zlib.crc32(data) != crc:
            raise UnreadableImage("wrong checksum in the zip")
        return data


class TarArchive(Archive):
    """An uncompressed .tar archive. The format has no checksums of file contents."""

    dtype = [("offset", "i8"), ("size", "i8")]

    def members(self, path: Path) -> Iterator[tuple[str, int, bool, tuple]]:
        """Yield (name, size in bytes, is_plain, (offset of the data, size)) for each member.

        is_plain is True only for regular files that are not sparse. A sparse file is not stored in
        one piece.
        """
        try:
            with (
                HeaderFile(path) as file,
                tarfile.open(path, "r:", file) as archive,
            ):
                while (entry := archive.next()) is not None:
                    # a million members would take a gigabyte
                    archive.members.clear()  # pyrefly: ignore[missing-attribute]  # not in typeshed
                    if entry.size < 0:  # tarfile would seek back and list the members forever
                        raise tarfile.ReadError(f"{entry.name} has a negative size, {entry.size}")
                    name, size = entry.name.removeprefix("./"), entry.size
                    is_plain = entry.isreg() and not entry.issparse()
                    yield name, size, is_plain, (entry.offset_data, size)
                end = archive.offset
        except (tarfile.TarError, OSError, ValueError, RecursionError) as error:
            raise DataError(
                f"{path} is not a tar, is compressed, or is truncated ({error}): "
                "if it is compressed, decompress it first"
            ) from error
        with open(path, "rb") as file:
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile also stops at a corrupt header
                raise DataError(f"{path} is corrupt: no header at byte {end}")

    def read(self, index: int) -> bytes:
        offset, size = self.fields[index].tolist()
        check_size(size)
        return self.file.read(offset, size)


class HeaderFile(io.FileIO):
    """A tar file, opened to read its headers. A read of more than MAX_HEADER bytes raises
    ReadError, because a corrupt header may state any size."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_HEADER:
            raise tarfile.ReadError(f"expected a header of 0 to {MAX_HEADER} bytes, got {size}")
        return super().read(size)


class MemberReader(Protocol):
    """What a dataset needs from an `Archive`, or from several that are read like one."""

    def read(self, index: int) -> bytes: ...

    def name(self, index: int) -> str: ...


class ArchiveDataset(ImageDataset):
    """A base class of datasets whose images are the members of `archive`, which a subclass sets."""

    splits = ("train", "val", "test")
    archive: MemberReader

    def content(self, index: int) -> bytes:
        return self.archive.read(index)

    def image(self, index: int) -> Image.Image | BandImage:
        return self.read(io.BytesIO(self.archive.read(index)))

    def sample_name(self, index: int) -> str:
        return self.archive.name(index)


def is_hidden(name: str) -> bool:
    """Return whether a member is a hidden file, or is in a hidden folder. name: its path."""
    return any(part.startswith(".") for part in name.split("/") if part != "..")


def check_size(size: int) -> None:
    """Raise UnreadableImage if `size`, a member's size in bytes, is above MAX_BYTES (1 GiB)."""
    if size > MAX_BYTES:
        raise UnreadableImage(f"{size} bytes are too many for an image (at most {MAX_BYTES})")


def warn(path: Path, problem: str, names: list[str]) -> None:
    """Log one warning about members of an archive. Does nothing if `names`, the names of these
    members, is empty. problem: what happened to them, such as "left out". The warning reads
    "<count> members were <problem>"."""
    if names:
        members = plural(len(names), "member was", "members were")
        logger.warning("%s: %s %s (the first: %s)", path, members, problem, names[0])
