"""Changes to files and command lines that nobody makes on purpose, each named by four numbers."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

NUMBERS = (
    "-1", "0", "1e308", "nan", "-inf", "9223372036854775808", "99999999999", "0.5", "1e-9", "07",
)  # fmt: skip
TEXTS = (
    "", " ", "../../outside/secret", "/etc/passwd", "\n", "\x1b[2J", "\x00", "a" * 5000,
    "\u202e\U0001d54f", "~", "-", "--", "-x", "=", "{}", "[]", "None", "True", "null", "'", '"',
    "\\", "%s", "{0}", "$HOME",
)  # fmt: skip
VALUES = (
    None, True, -1, 0, 1 << 63, 1e308, float("nan"), "", "x\n", [], {}, [[]], {"a": 1}, "../x",
    [1, "a"],
)  # fmt: skip
BYTES = (
    b"\x00", b"\xff", b"\n", b"\t", b"\x80" * 8, b"\xff" * 8, b"\x00" * 512, b"9" * 40,
    b"PK\x05\x06",
)  # fmt: skip


class Change(NamedTuple):
    """A kind of mutation, and three numbers that say which file, where, and what."""

    kind: int
    file: int
    where: int
    what: int


def pick(choices, number: int) -> Any:
    return choices[number % len(choices)]


# Of bytes


def flip(content: bytes, where: int, what: int) -> bytes:
    at = where % max(len(content), 1)
    return (
        content[:at] + bytes([content[at] ^ (1 << what % 8)]) + content[at + 1 :]
        if content
        else b"\0"
    )


def insert(content: bytes, where: int, what: int) -> bytes:
    at = where % (len(content) + 1)
    return content[:at] + pick(BYTES, what) + content[at:]


def overwrite(content: bytes, where: int, what: int) -> bytes:
    at, new = where % (len(content) + 1), pick(BYTES, what)
    return content[:at] + new + content[at + len(new) :]


def cut(content: bytes, where: int, what: int) -> bytes:
    at = where % (len(content) + 1)
    return content[:at] + content[at + what % 64 + 1 :]


def truncate(content: bytes, where: int, what: int) -> bytes:
    return content[: where % (len(content) + 1)]


def repeat(content: bytes, where: int, what: int) -> bytes:
    at, length = where % (len(content) + 1), what % 2000 + 1
    return content[: at + length] + content[at:]


# Of text and JSON


def change_token(pattern: str, choices: tuple[str, ...]) -> Callable[[bytes, int, int], bytes]:
    def change(content: bytes, where: int, what: int) -> bytes:
        text = content.decode("latin-1")
        found = list(re.finditer(pattern, text))
        if not found:
            return insert(content, where, what)
        begin, end = pick(found, where).span()
        return (text[:begin] + pick(choices, what) + text[end:]).encode("utf-8", "surrogatepass")

    return change


def repeat_line(content: bytes, where: int, what: int) -> bytes:
    lines = content.splitlines(keepends=True)
    if not lines:
        return b"\n"
    at = where % len(lines)
    return b"".join(lines[:at] + lines[at : at + 1] * (what % 3 * 2) + lines[at + 1 :])


def change_json(content: bytes, where: int, what: int) -> bytes:
    """Replace or delete a value, or nest it deeply. Flip a bit of a file that is not JSON."""
    try:
        tree = [json.loads(content)]
    except ValueError:
        return flip(content, where, what)
    holder, key = pick(list(walk(tree)), where)
    if what % 7 == 0:
        del holder[key]
    elif what % 7 == 1:
        for _ in range(300):  # three such changes are below the limit of Python's own encoder
            holder[key] = [holder[key]]
    else:
        holder[key] = pick(VALUES, what)
    return json.dumps(tree[0] if tree else None).encode("utf-8", "surrogatepass")


def walk(tree: Any):
    """Yield (container, key) of all values of a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, dict | list):
            yield from walk(value)


CONTENT = (
    flip, insert, overwrite, cut, truncate, repeat, repeat_line, change_json, change_json,
    change_token(r"-?\d+(\.\d+)?", NUMBERS), change_token(r"[A-Za-z_./]+", TEXTS),
)  # fmt: skip


# Of files


def remove(file: Path, outside: Path) -> None:
    file.unlink()


def make_folder(file: Path, outside: Path) -> None:
    file.unlink()
    file.mkdir()


def make_pipe(file: Path, outside: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link_out(file: Path, outside: Path) -> None:
    shutil.copy(file, outside / "linked")
    file.unlink()
    file.symlink_to(outside / "linked")


def link_to_itself(file: Path, outside: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def link_to_device(file: Path, outside: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


PLACE = (remove, make_folder, make_pipe, link_out, link_to_itself, link_to_device)
KINDS = len(CONTENT) * 3 + len(PLACE)  # content three times as often


def apply(change: Change, files: list[Path], outside: Path) -> None:
    """Change one of the files. Files that an earlier change replaced stay as they are."""
    usable = [file for file in files if file.is_file() and not file.is_symlink()]
    if not usable:
        return
    file, kind = pick(usable, change.file), change.kind % KINDS
    if kind < len(PLACE):
        PLACE[kind](file, outside)
    else:
        content = pick(CONTENT, kind)(file.read_bytes(), change.where, change.what)
        file.write_bytes(content)


def change_words(words: list[str], change: Change) -> list[str]:
    """Change a command line: a word or a value is replaced, repeated, dropped or moved."""
    words, at = list(words), change.where % max(len(words), 1)
    if not words:
        return [pick(TEXTS, change.what)]
    kind = change.kind % 6
    if kind == 0:
        del words[at]
    elif kind == 1:
        words.insert(at, words[change.what % len(words)])
    elif kind == 2:
        words.insert(at, pick(TEXTS, change.what).replace("\0", ""))
    elif kind == 3 and "=" in words[at]:
        new = pick(TEXTS + NUMBERS, change.what).replace("\0", "")
        words[at] = f"{words[at].partition('=')[0]}={new}"
    elif kind == 4:
        words[at] = words[at][: change.what % (len(words[at]) + 1)]
    else:
        words.append(words.pop(at))
    return words
