"""The shared flags, `vil config`, and the manual it writes."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vil.cli import config as command
from vil.cli.arguments import config_arguments, resolve
from vil.config import get_config

pytestmark = pytest.mark.smoke

BASE = "_base_/classification.yaml"
DOCS = Path(__file__).parents[2] / "docs/reference/config.md"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("PT_DATA_DIR", raising=False)
    monkeypatch.delenv("PT_OUTPUT_DIR", raising=False)


def resolved(*words):
    parser = argparse.ArgumentParser()
    config_arguments(parser)
    return resolve(parser.parse_args(words))


def printed(capsys, *words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(words)) == 0
    return capsys.readouterr().out


SETTINGS = "OPTIM.LR 1e-3 MODEL.VIT.MSVIT.MODE -1"
FLAGS = f"--config-file {BASE} --data D --output_dir O"


@pytest.mark.parametrize(
    "line",
    [
        f"{FLAGS} {SETTINGS}",
        f"{SETTINGS} {FLAGS}",
        f"--cfg {BASE} --data-path D --output O --opts OPTIM.LR 1e-3 MODEL.VIT.MSVIT.MODE=-1",
        f"--local_rank=0 --config_file {BASE} --opts {SETTINGS} --data_dir D --output-dir=O",
        f"--local-rank 1 --cfg {BASE} {SETTINGS} --opts DATA.PATH D OUTPUT_DIR O",
    ],
)
def test_command_lines_people_type(line):
    cfg = resolved(*line.split())
    assert (cfg.OPTIM.LR, cfg.MODEL.VIT.MSVIT.MODE, cfg.OPTIM.EPOCHS) == (1e-3, -1, 300)
    assert (cfg.DATA.PATH, cfg.OUTPUT_DIR) == ("D", "O")


def test_who_wins(monkeypatch, tmp_path):
    """Flag over KEY VALUE over file over environment over default."""
    assert resolved().DATA.PATH == "./datasets"
    monkeypatch.setenv("PT_DATA_DIR", "env")
    monkeypatch.setenv("PT_OUTPUT_DIR", "env")
    assert (resolved().DATA.PATH, resolved().OUTPUT_DIR) == ("env", "env")
    file = tmp_path / "x.yaml"
    file.write_text("DATA: {PATH: file}\n")
    assert resolved("--cfg", str(file)).DATA.PATH == "file"
    assert resolved("--cfg", str(file), "DATA.PATH", "key").DATA.PATH == "key"
    assert resolved("DATA.PATH", "key", "--data", "flag").DATA.PATH == "flag"


def test_config_prints_a_config_that_names_its_sources(capsys, tmp_path):
    words = ["--config-file", BASE, "DATA.KWARGS.sizes", "[[1, 2], [3]]", "DATA.KWARGS.no", "on"]
    words += ["DATA.KWARGS.text", "two\nlines: of text"]
    out = printed(capsys, *words)
    assert "classification.yaml:" in next(x for x in out.splitlines() if "EPOCHS: 300" in x)
    assert "    sizes: [[1, 2], [3]]  # command line\n" in out
    assert '    "no": true  # command line\n' in out
    (tmp_path / "again.yaml").write_text(out)
    assert get_config(tmp_path / "again.yaml") == resolved(*words)


def test_a_terminal_that_cannot_spell_a_name_gets_it_escaped():
    ended = subprocess.run(
        [sys.executable, "-m", "vil", "config", "--data", "Bücher"], capture_output=True, text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "B\\xfccher" in ended.stdout


def test_diff_prints_a_config_too(capsys, tmp_path):
    words = ["--config-file", BASE, "OPTIM.OPT", "sgd"]
    out = printed(capsys, *words, "--diff")
    assert "OPTIM.OPT: sgd  # not 'adamw'; from command line\n" in out
    assert "WARMUP_EPOCHS" not in out
    (tmp_path / "again.yaml").write_text(out)
    assert get_config(tmp_path / "again.yaml") == resolved(*words)
    out = printed(capsys, *words, f"--diff={BASE}")
    assert out == "OPTIM.OPT: sgd  # not 'adamw'; from command line\n"


@pytest.mark.detection
def test_manual_is_up_to_date(tmp_path, capsys):
    printed(capsys, "--docs", str(tmp_path / "config.md"))
    assert (tmp_path / "config.md").read_text() == DOCS.read_text(), (
        "run: vil config --docs docs/reference/config.md"
    )
