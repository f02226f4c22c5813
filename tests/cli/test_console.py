"""What a person sees on a terminal of 100 columns: whole words, no line that is longer."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests.common.small_runs import TINY, command, environment

COLUMNS = 100
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(*words) -> list[str]:
    """Run a command on a terminal, and return the lines that it showed. Each state of a progress
    bar is a line."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
    env = {k: v for k, v in environment(TERM="xterm").items() if k not in ("COLUMNS", "LINES")}
    options = dict(stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    process, shown = subprocess.Popen(command(*words), **options), b""
    os.close(theirs)
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # Linux reports the end of a terminal like this
            break
        if not block:
            break
        shown += block
    os.close(ours)
    assert process.wait(60) == 0, shown.decode()
    return re.split(r"[\r\n]+", CONTROL.sub("", shown.decode()))


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """The lines of a training run, and its folder. The config causes a long warning."""
    folder = tmp_path_factory.mktemp("console") / "run"
    words = (*TINY, "LOG_FREQ=2", "OPTIM.EMA=0.9999", "--output_dir", folder)
    return on_terminal("train", *words), folder


def test_no_line_of_a_training_run_is_longer_than_the_terminal(training):
    shown, folder = training
    long = [line for line in shown if len(line) > COLUMNS and str(folder) not in line]
    assert not long
    assert sum(line.startswith(" " * 9) for line in shown) > 0  # of a wrapped warning
    assert any(line.endswith(f"vil report {folder}") for line in shown)  # can be copied


def test_the_bar_shows_epoch_and_loss(training):
    shown, folder = training
    assert any(re.search(r"^epoch [12]\.\d\d/2 loss \d\.\d{4} .* \d/8 ", line) for line in shown)
    assert not any("grad_norm" in line for line in shown)
    assert (folder / "log.txt").read_text().count(" grad_norm ") == 4


def test_evaluations_show_the_metric_that_selects_best(training):
    shown, folder = training
    lines = [line for line in shown if re.match(r"\d\d:\d\d:\d\d val epoch", line)]
    assert [" top1 " in line for line in lines] == [True, True]
    assert " auroc " in (folder / "log.txt").read_text()


@pytest.mark.long
def test_an_evaluation_wraps_its_metrics(training):
    shown = on_terminal("evaluate", "--run", training[1])
    assert max(map(len, shown)) <= COLUMNS
    assert " count 64" in " ".join(shown)


@pytest.mark.long
def test_a_pipe_gets_a_line_per_message(training, tmp_path):
    words = (*TINY, "OPTIM.EPOCHS=1", "OPTIM.EMA=0.9999", "--output_dir", tmp_path / "run")
    done = subprocess.run(
        command("train", *words), capture_output=True, text=True, env=environment(), check=True
    )
    messages = Path(tmp_path, "run/log.txt").read_text().splitlines()
    shown = done.stdout.splitlines()
    assert len(shown) == len(messages)
    for line, message in zip(shown, messages):
        kind = message.split()[1]
        if kind in ("train", "val"):
            assert len(line) <= COLUMNS
            assert line.split()[1] == kind
        else:
            assert line.split(" ", 1)[1] == message.split(" ", 1)[1]
