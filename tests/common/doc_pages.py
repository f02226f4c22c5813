"""Pages of the documentation: their code blocks, command lines, and a process that runs blocks."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.common.doc_commands import ROOT

TOP = ("README.md", "MODEL_ZOO.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*TOP, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """The fenced blocks of a page."""
    text, found = read(page), []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(page, line, match[1], match[2]))
    return tuple(found)


def command_lines(page: str) -> list[str]:
    """The lines of the page's bash blocks, continued ones joined, without comments."""
    code = "".join(block.code for block in blocks(page) if block.language == "bash")
    lines = code.replace("\\\n", " ").splitlines()
    return [line for text in lines if (line := re.sub(r"(^|\s+)#.*", "", text).strip())]


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)


# Imports torch once and runs each page in a fork of its own: nothing that a page registers or
# changes reaches another one. No thread runs before a fork.
SERVER = """
import json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import matplotlib; matplotlib.use("agg")
import timm, torch, torchvision, vil, vil.ops, vil.models.vision_longformer
for request in sys.stdin:
    folder, blocks = json.loads(request)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        names, error = {"__name__": "__main__"}, "done"
        try:
            for name, code in blocks:
                exec(compile(code, name, "exec"), names)
        except BaseException:
            error = traceback.format_exc()[-60000:]
        os.write(send, error.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as file:
        answer = file.read().decode()
    os.waitpid(child, 0)
    print(json.dumps(answer), file=answers, flush=True)
os._exit(0)  # at once: nothing is left to clean up
"""


class PythonBlocks:
    """A process that runs the Python blocks of pages."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", SERVER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def __call__(self, page: str, folder: Path) -> str:
        """Run all blocks of a page in the folder, in one namespace; "done" or the traceback."""
        code = [(f"{b.page}:{b.line}", b.code) for b in blocks(page) if b.language == "python"]
        return self.run(code, folder)

    def run(self, code: list[tuple[str, str]], folder: Path) -> str:
        """Run pieces of code, each with a name for tracebacks."""
        self.process.stdin.write(json.dumps([str(folder), code]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
