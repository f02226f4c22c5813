"""Ctrl-C, SIGTERM and SIGHUP end every command in good order."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.common.small_runs import command, environment, vil

pytestmark = [pytest.mark.trust(8), pytest.mark.usefixtures("heard_signals")]

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
OUTPUTS = {"predict": "out.csv", "embed": "out.npy"}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("number", CODES)
def test_a_stopped_command_removes_its_temporary_files(
    trained, tmp_path, monkeypatch, name, number
):
    def batches(*_, **__):
        assert [file for file in tmp_path.iterdir() if file.name.startswith(".")]
        os.kill(os.getpid(), number)
        time.sleep(9)
        yield

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"vil.workflows.{name}.iter_image_batches", batches)
    Image.new("RGB", (32, 32)).save("a.png")
    ended = vil(name, "--run", trained, "a.png", "--output-file", OUTPUTS[name])
    assert ended.code == CODES[number], ended.err
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]
    assert "Traceback" not in ended.err


@pytest.mark.long
@pytest.mark.parametrize(("number", "seconds"), [*zip(CODES, [0, 0.2, 1])])
def test_a_signal_during_the_start_leaves_no_traceback(number, seconds):
    words = dict(env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command("predict", "-"), stdin=subprocess.PIPE, **words) as process:
        wait_for_handlers(process.pid)
        time.sleep(seconds)
        process.send_signal(number)
        _, error = process.communicate(timeout=100)
    assert process.returncode == CODES[number], error
    assert "Traceback" not in error


def wait_for_handlers(pid):
    """Wait until a process handles SIGHUP, which Python does not do by itself."""
    while True:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
        if int(caught, 16) & 1 << signal.SIGHUP - 1:
            return
        time.sleep(0.005)
