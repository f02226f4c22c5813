"""Standard output and stderr may be full, closed or gone, and errors are one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.small_runs import TINY, command, environment, metrics, vil

pytestmark = pytest.mark.trust(8)

SHORT = (*TINY, "OPTIM.EPOCHS=1", "DATALOADER.WORKERS=0")
REDIRECTIONS = {
    "full, and a reader that left": "2>/dev/full | true",
    "all closed": "<&- >&- 2>&-",
}


def shell(line, cwd, **options):
    line = f"set -o pipefail; {line}"
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment(), text=True, capture_output=True,
        timeout=100, **options,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("redirection", REDIRECTIONS.values(), ids=REDIRECTIONS)
def test_training_continues_without_its_streams(tmp_path, redirection):
    train = " ".join(f"'{word}'" for word in command("train", "--output_dir", "run", *SHORT))
    ended = shell(f"{train} {redirection}", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert metrics(tmp_path / "run", "val")
    assert "val epoch 1" in (tmp_path / "run/log.txt").read_text()


SLOW = ("info", "predict --sample --format json")


@pytest.mark.parametrize(
    "line", ["config", "--help", *(pytest.param(line, marks=pytest.mark.long) for line in SLOW)]
)
def test_other_commands_end_with_a_line(tmp_path, line):
    vil_ = f"'{sys.executable}' -m vil {line}"
    ended = shell(f"{vil_} >/dev/full", tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "vil: standard output: No space left on device"
    assert "Traceback" not in ended.stderr
    assert shell(f"{vil_} | true", tmp_path).returncode == 0
    assert shell(f"{vil_} >&-", tmp_path).returncode == 0


@pytest.mark.long
def test_no_file_becomes_standard_output(tmp_path):
    """The number of a closed stream is not given to the next file that is opened."""
    ended = shell(f"'{sys.executable}' -m vil predict --sample --output-file p.txt >&-", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(Path(tmp_path, "p.txt").read_text().splitlines()) > 360


def test_a_terminal_gets_no_control_characters():
    from vil.utils.console import StandardStream

    written = []
    terminal = type("Terminal", (), {"isatty": lambda self: True, "write": written.append})
    StandardStream(terminal(), strict=True).write("a\x1b[2Jb\rc\x9bd\te\n")
    assert written == ["a\\x1b[2Jb\\x0dc\\x9bd\te\n"]


@pytest.mark.parametrize("name", ["predict", "data", "evaluate"])
def test_messages_have_no_control_characters_anywhere(tmp_path, name):
    """Names of files and classes, also where the output is read later."""
    words = {
        "predict": ("predict", "no\x1b[2Jne.png"),
        "data": ("data", "check", "--data", "no\x1b[2Jne"),
        "evaluate": ("evaluate", *TINY, "--data", "x", "DATA.TEST=[no\x1b[2Jne]"),
    }[name]
    ended = vil(*words)
    assert ended.code
    assert "\x1b" not in ended.out + ended.err


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """A command that raises an error that nobody expected."""

    def fail(*args):
        raise KeyError("a\nb")

    monkeypatch.setattr("vil.cli.config.annotate", fail)
    monkeypatch.setenv("VIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.trust(9)
def test_an_unexpected_error_is_a_line_and_a_file(broken):
    ended = vil("config")
    assert ended.code == 1
    (file,) = broken.glob("traceback-*.txt")
    assert ended.err == f"vil config: unexpected KeyError: 'a\\nb'; the traceback is in {file}\n"
    assert "KeyError" in file.read_text()
    assert "Traceback" in file.read_text()


@pytest.mark.trust(9)
def test_a_traceback_can_be_shown(broken, monkeypatch):
    assert "Traceback (most recent call last)" in vil("config", "--traceback").err
    monkeypatch.setenv("VIL_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in vil("config").err


@pytest.mark.trust(9)
@pytest.mark.parametrize("line", ["predict --nosuch", "train --output_dir", "report " + "a" * 5000])
def test_wrong_arguments_are_a_line(line):
    ended = vil(*line.split())
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
