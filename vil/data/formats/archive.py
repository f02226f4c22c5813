"""Pictures inside one .zip or one plain .tar, read in place: nothing is ever extracted.

The members are listed once, with the standard library, into a few numpy buffers whose pages forked
workers share; the bytes are then read through a SharedFile. Three rules for both kinds:

- a wanted member that is a link, or whose name is absolute or climbs with "..", is left out, with
  one warning
- of members with the same name the last counts, as for unzip and tar, with one warning
- a wanted member that is encrypted, or packed by another method than store and deflate, is a
  DataError: leaving it out would shrink the dataset
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

import numpy as np
from PIL import Image

from vil.data.formats.shared_file import SharedFile
from vil.data.image import UnreadableImage, read_image
from vil.utils.errors import DataError

logger = logging.getLogger(__name__)

# A header may claim any size; no picture that PIL accepts is larger than this.
MAX_BYTES = 1 << 30


class Archive:
    """The members for which `wanted(name, bytes)` is true, in the order of the archive.

    `names` (M,) bytes, `fields` (M,) what a subclass needs to read one.
    """

    dtype: list[tuple]

    def __init__(self, path: Path, wanted: Callable[[str, int], bool]):
        self.file = SharedFile(path)
        rows, odd, repeated = {}, [], []
        for name, size, member in self.members(path):
            if not wanted(name, size):
                continue
            if not self.is_plain(member) or name.startswith("/") or ".." in name.split("/"):
                odd.append(name)
                continue
            if rows.pop(name, None):
                repeated.append(name)
            rows[name] = self.row(member)
        warn(path, "left out (links, absolute names or names with '..')", odd)
        warn(path, "replaced by later ones of the same name", repeated)
        self.names = np.array([os.fsencode(name) for name in rows])
        self.fields = np.array(list(rows.values()), self.dtype)

    def __len__(self) -> int:
        return len(self.fields)

    def keep(self, indices: np.ndarray) -> None:
        """Only these members, in this order."""
        self.names, self.fields = self.names[indices], self.fields[indices]

    def name(self, index: int) -> str:
        """A member's name, with the archive's: train.zip@cat/1.jpg."""
        return f"{Path(self.file.path).name}@{os.fsdecode(self.names[index])}"

    def image(self, index: int) -> Image.Image:
        """The decoded member. Raises UnreadableImage."""
        return read_image(io.BytesIO(self.read(index)))

    def members(self, path: Path) -> Iterator[tuple[str, int, object]]:
        """Name, bytes and the standard library's description of each member."""
        raise NotImplementedError

    def is_plain(self, member: object) -> bool:
        """No link, folder or device."""
        raise NotImplementedError

    def row(self, member: object) -> tuple:
        """The fields of a member."""
        raise NotImplementedError

    def read(self, index: int) -> bytes:
        """The unpacked bytes of a member. OSError, UnreadableImage."""
        raise NotImplementedError


class ZipArchive(Archive):
    """A .zip, stored or deflated. `offset` is that of the local header before the data."""

    dtype = [("offset", "i8"), ("packed", "i8"), ("size", "i8"), ("method", "i2"), ("crc", "u4")]

    def members(self, path: Path) -> Iterator[tuple[str, int, zipfile.ZipInfo]]:
        """In the order of the zip's directory. DataError when it is no zip."""
        try:
            with zipfile.ZipFile(path) as archive:
                directory = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            raise DataError(f"{path} is no zip, or not a whole one: {error}") from error
        for member in directory:
            yield member.filename, member.file_size, member

    def is_plain(self, member: zipfile.ZipInfo) -> bool:
        """The upper half holds Unix's file type, 0 where the zip was made elsewhere."""
        return not stat.S_ISLNK(member.external_attr >> 16)

    def row(self, member: zipfile.ZipInfo) -> tuple:
        """DataError for what is never read."""
        if member.flag_bits & 1 or member.compress_type not in (
            zipfile.ZIP_STORED,
            zipfile.ZIP_DEFLATED,
        ):
            raise DataError(
                f"{self.file.path}: {member.filename} is encrypted or packed by method "
                f"{member.compress_type}; only stored (0) and deflated (8) members are read"
            )
        return (
            member.header_offset,
            member.compress_size,
            member.file_size,
            member.compress_type,
            member.CRC,
        )

    def read(self, index: int) -> bytes:
        """Unpacked and checked. The local header alone knows how long it is itself."""
        offset, packed, size, method, crc = self.fields[index].tolist()
        if max(size, packed) > MAX_BYTES:
            raise UnreadableImage(f"{size} bytes are no picture")
        header = self.file.read(offset, 30)
        if header[:4] != b"PK\3\4":
            raise UnreadableImage("no member begins where the zip's directory says")
        data = self.file.read(offset + 30 + sum(struct.unpack("<HH", header[26:30])), packed)
        if method == zipfile.ZIP_DEFLATED:
            data = inflate(data, size)
        if len(data) != size or zlib.crc32(data) != crc:
            raise UnreadableImage("wrong checksum in the zip")
        return data


class TarArchive(Archive):
    """A .tar that is not compressed: data lie there as they are, without a checksum."""

    dtype = [("offset", "i8"), ("size", "i8")]

    def members(self, path: Path) -> Iterator[tuple[str, int, tarfile.TarInfo]]:
        """In the order of the archive. DataError when it is no tar, compressed or cut."""
        try:
            with tarfile.open(path, "r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # a million of them would be a gigabyte
                    yield member.name.removeprefix("./"), member.size, member
                end = archive.offset
        except (tarfile.TarError, OSError) as error:
            raise DataError(
                f"{path} is no plain tar, or not a whole one (compressed? unpack it): {error}"
            ) from error
        self.refuse_damage(end)

    def refuse_damage(self, end: int) -> None:
        """tarfile takes a damaged header for the end, where there should be zeros or nothing."""
        with open(self.file.path, "rb") as file:
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise DataError(f"{self.file.path} is damaged: no header at byte {end}")

    def is_plain(self, member: tarfile.TarInfo) -> bool:
        """A sparse file's data are not in one piece."""
        return member.isreg() and not member.issparse()

    def row(self, member: tarfile.TarInfo) -> tuple:
        """Place and length of the data."""
        return member.offset_data, member.size

    def read(self, index: int) -> bytes:
        """The bytes as they are."""
        offset, size = self.fields[index].tolist()
        if size > MAX_BYTES:
            raise UnreadableImage(f"{size} bytes are no picture")
        return self.file.read(offset, size)


def inflate(data: bytes, size: int) -> bytes:
    """At most `size` bytes, whatever the data would grow to. UnreadableImage."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, max(size, 1))
    except zlib.error as error:
        raise UnreadableImage(f"zlib.error: {error}") from error


def warn(path: Path, what: str, names: list[str]) -> None:
    """One line for all members that share a fate."""
    if names:
        logger.warning("%s: %d members %s, the first: %s", path, len(names), what, names[0])
