"""Small runs, inside the test's process and as processes of their own.

As a program: the command lines given as JSON, one after the other in the same process. That is how
test_torchrun.py runs several commands for the price of one start.
"""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vil.cli import main
from vil.engine.checkpoint.save_load import resolve_link

# Two stages of one block each: 8 x 8 tokens in chunks of 3, then 4 x 4 with full attention.
SMALL = (
    "INPUT.IMAGE_SIZE=32", "DATALOADER.BSZ=16", "LOG_FREQ=1", "OPTIM.OPT=sgd", "OPTIM.LR=0.01",
    "OPTIM.EPOCHS=2", "DEVICE=cpu",
    "MODEL.VIT.MSVIT.ARCH=l1,h1,d16,n1,s1,g1,p4,f3,a0_l2,h2,d32,n1,s0,g1,p2,f3,a0",
)  # fmt: skip
FAKE = (
    "DATA.TRAIN=[fake]", "DATA.TEST=[fake]", "DATA.NUM_CLASSES=4",
    "DATA.KWARGS={n: 64, size: 32, num_classes: 4}",
)  # fmt: skip
TINY = (*SMALL, *FAKE)
FOLDER = ("DATA.TRAIN=[folder]", "DATA.TEST=[folder]", "DATA.NUM_CLASSES=2")
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_THE_ORIGINAL = ("PT_DATA_DIR", "PT_OUTPUT_DIR")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def vil(*words) -> Outcome:
    """The command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:  # argparse
            code = end.code
    return Outcome(code, out.getvalue(), err.getvalue())


def succeeds(*words) -> str:
    """What the command printed; fails if it did."""
    ended = vil(*words)
    assert ended.code == 0, ended.err
    return ended.out


def command(*words) -> list[str]:
    """The command as a process."""
    return [sys.executable, "-m", "vil", *map(str, words)]


def torchrun(world, *command_lines) -> None:
    """The commands, one after the other, in each of `world` processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    lines = json.dumps([[str(word) for word in line] for line in command_lines])
    ports = json.dumps([free_port() for _ in command_lines])
    subprocess.run(
        [*launcher, f"--nproc_per_node={world}", __file__, lines, ports], env=environment(),
        check=True, timeout=300,
    )  # fmt: skip


def draw_pictures(root, counts: dict[str, int]) -> Path:
    """PNG files in the sub-folders named; returns the root."""
    for name, count in counts.items():
        folder = Path(root, name)
        folder.mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (40, 36), (40 * number, 100, 50)).save(folder / f"{number}.png")
    return Path(root)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(**more) -> dict[str, str]:
    """One thread, and nothing that says how many processes there are."""
    unset = (*OF_TORCHRUN, *OF_THE_ORIGINAL)
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def metrics(folder, split="") -> list[dict]:
    """The lines of metrics.jsonl whose split starts with `split`."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["split"].startswith(split)]


def figures(lines) -> list[dict]:
    """What of metrics.jsonl must be the same in every repetition: all but times and memory."""
    varying = ("wall", "time", "data", "img/s", "mem")
    return [{k: v for k, v in line.items() if k not in varying} for line in lines]


def checkpoint(folder, name="last") -> Path:
    return resolve_link(Path(folder, "checkpoints"), name)


def results(folder) -> dict:
    """What the newest `vil evaluate` wrote."""
    files = Path(folder, "eval").rglob("results.json")
    return json.loads(max(files, key=lambda file: file.stat().st_mtime_ns).read_text())


def numbers(line, *names) -> dict[str, str]:
    """{name: number as printed} of a line of `name number` pairs."""
    return {name: re.search(rf"\b{name} (\S+)", line)[1] for name in names}


if __name__ == "__main__":
    for line, port in zip(*map(json.loads, sys.argv[1:])):
        if code := main(line):
            sys.exit(code)
        # The next group must not meet in torchrun's store, where this one's addresses stand.
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
